"""Draws functional models: each layer is called on some tensor before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from case import Options
from data_sources import SHAPES
from generate_layers import ANY, counted
from generate_odd import Topic
from generate_wide import WIDE
from grow_positions import sequence
from growth import Growth
from state_layers import CLASSES as STATE

OPS = ("sine", "centre", "softly")


def graph(
    rng: random.Random, found: Options, topic: Topic | None = None
) -> Growth:
    """Layers of a graph whose loose ends are joined."""
    kinds = ("vector", "pair", "sequence")
    kind = (topic and topic.inputs) or rng.choices(kinds, (6, 3, 2))[0]
    found["inputs"] = kind
    shape: tuple[Any, ...] = SHAPES.get(kind, (4,))
    if "length" in found:
        shape = (None, *shape[1:])
    growth = Growth(rng, shape, is_wide=True, at="x0")
    if topic:
        growth.planned = [lambda g: topic.grow(g, found)]
    count = 1 + (kind in ("pair", "names"))
    growth.tensors = [(f"x{i}", shape) for i in range(count)]
    count = rng.choice((2, 3, 4, 4, 5, 6))
    for i in range(count):
        recent = growth.tensors[-3:]
        growth.at, growth.shape = rng.choice((*growth.tensors, *recent))
        is_last = i == count - 1 or bool(topic and topic.is_first)
        if growth.add_planned(is_last):
            growth.tensors.append((growth.at, growth.shape))
            continue
        choices = [*ANY, *WIDE, *GRAPH]
        is_sequence = len(growth.shape) == 2 and growth.shape[0]
        choices += [(2, sequence)] if is_sequence else []
        weights, functions = zip(*choices, strict=True)
        rng.choices(functions, weights)[0](growth)
        growth.tensors.append((growth.at, growth.shape))
    if kind == "sequence" and topic is None:
        _read_aside(growth, random.Random(found["seed"]))
    _join(growth)
    return growth


def _read_aside(g: Growth, rng: random.Random) -> None:
    """At times, a branch that reads what a longer one keeps.

    Its end comes first, so that it is run first where only bytes count.

    Args:
        g: The graph.
        rng: Of its own, by which other cases are what they were.
    """
    if rng.random() < 0.4:
        g.rng, before = rng, g.rng
        start = g.tensors[0]
        g.at, g.shape = start
        name = g.add(rng.choice(sorted(STATE)))
        for _ in range(2):
            g.add("layer_norm")
        longer = g.at, g.shape
        g.at = start[0]
        g.add("state_reader", keeps=False, of=name)
        g.tensors[1:1] = [(g.at, g.shape), longer]
        g.rng = before


def _join(g: Growth) -> None:
    """One vector of all that no layer takes."""
    taken = {name for spec in g.specs for name in spec.takes}
    ends = []
    for name, shape in g.tensors:
        if name in taken:
            continue
        g.at, g.shape = name, shape
        if len(shape) == 2:
            g.add("global_average_1d", keeps=False)
            g.shape = shape[-1:]
        ends.append((g.at, g.shape))
    width = sum(shape[-1] for _, shape in ends)
    if len(ends) > 1:
        takes = tuple(name for name, _ in ends)
        g.add("concatenate", keeps=False, takes=takes)
        g.shape = (width,)


# ---------------------------------------------------------------- what is drawn
def merge(g: Growth) -> None:
    """Two tensors of one shape, or of one length."""
    kind = g.rng.choice(("add", "add", "multiply", "concatenate"))
    joins = kind == "concatenate"
    others = [
        (name, shape)
        for name, shape in g.tensors
        if name != g.at and _fits(g, shape, joins)
    ]
    if not others:
        return operation(g)
    other, shape = g.rng.choice(others)
    g.add(kind, keeps=False, takes=(g.at, other))
    if joins:
        g.shape = (*g.shape[:-1], g.width + shape[-1])


def _fits(g: Growth, shape: tuple[int, ...], joins: bool) -> bool:
    return shape[:-1] == g.shape[:-1] if joins else shape == g.shape


def operation(g: Growth) -> None:
    g.add("op", keeps=False, which=g.rng.choice(OPS))


def model(g: Growth) -> None:
    """A model of tensors that this graph has too, called on another one."""
    sources = _sources(g)
    lasts = [
        (name, shape, *sources[name])
        for name, shape in g.tensors
        if len(sources[name]) == 1 and name not in sources[name]
    ]
    lasts = [last for last in lasts if dict(g.tensors)[last[2]] == g.shape]
    if not lasts:
        return merge(g)
    last, shape, first = g.rng.choice(lasts)
    name = g.add("model", keeps=False, first=first, last=last)
    if shape == g.shape:
        g.keeping.append((name, shape))
    g.shape = shape


def _sources(g: Growth) -> dict[str, set[str]]:
    """The inputs that each tensor depends on."""
    found = {name: {name} for name, _ in g.tensors if name[0] == "x"}
    for spec in g.specs:
        found[spec.name] = set().union(*(found[name] for name in spec.takes))
    return found


def beside(g: Growth) -> None:
    """A wrapper's layer, and its weights, beside the wrapper."""
    if len(g.shape) > 1:
        return merge(g)
    if g.rng.random() < 0.3:
        return counted(g)
    start = g.at
    wrapper = g.add("spectral", units=g.width)
    g.tensors.append((g.at, g.shape))
    if g.rng.random() < 0.5:
        g.at = start
    kind = g.rng.choice(("inner_of", "plus", "tied_inner"))
    g.add(kind, keeps=False, of=wrapper)


GRAPH: list[tuple[int, Callable[[Growth], None]]] = [
    (6, merge),
    (3, operation),
    (5, model),
    (3, beside),
]
