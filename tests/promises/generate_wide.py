"""Draws state, tables, quantised weights, and layers told apart by names."""

from __future__ import annotations

import random
from collections.abc import Callable

from case import Options
from growth import Growth
from special_layers import CLASSES as SPECIAL
from state_layers import CLASSES as STATE

READS = ("none", "before", "after", "after")
LOOKS = ("inputs", "constants", "both", "draws", "draws", "drawn rows")
NORMS: tuple[tuple[str, Options], ...] = (
    ("batch_norm", {"momentum": 0.8, "renorm": True}),
    ("batch_norm", {"momentum": 0.8, "scale": False}),
    ("batch_norm", {"momentum": 0.8, "center": False, "epsilon": 0.1}),
    ("unbiased_norm", {"momentum": 0.8}),
    ("warm_norm", {"momentum": 0.9}),
)


def state(g: Growth) -> None:
    kind = g.rng.choice(sorted(STATE))
    name = g.add(kind, reads=g.rng.choice(READS))
    g.states.append((name, g.shape))


def state_reader(g: Growth) -> None:
    """Reads what an earlier layer keeps, at once or after another layer."""
    names = [name for name, shape in g.states if shape == g.shape]
    if not names:
        state(g)
        names = [g.states[-1][0]]
        if g.rng.random() < 0.5:
            g.add("layer_norm")
    g.add("state_reader", keeps=False, of=g.rng.choice(names))


def special(g: Growth) -> None:
    g.add(g.rng.choice(sorted(SPECIAL)))


def lookup(g: Growth) -> None:
    g.add("lookup", by=g.rng.choice(LOOKS))


def norm(g: Growth) -> None:
    kind, options = g.rng.choice(NORMS)
    name = g.add(kind, **options)
    if g.rng.random() < 0.15:
        g.add("moments_reader", keeps=False, of=name)


def changed_dense(g: Growth) -> None:
    """Quantised, or with an adapter, or in a dtype of its own."""
    kinds = ("float8_dense", "int8_dense", "lora_dense", "dense")
    kind = g.rng.choice(kinds)
    if kind == "dense":
        dtype = g.rng.choice(("float32", "mixed_bfloat16"))
        g.add(kind, keeps=False, units=g.width, dtype=dtype)
    else:
        g.add(kind, units=g.width, width=g.width)


def near_dense(g: Growth) -> None:
    """Its regulariser reads another layer's kernel."""
    if not g.squares.get(g.width):
        name = g.add("dense", units=g.width)
        g.squares.setdefault(g.width, []).append(name)
    of = g.rng.choice(g.squares[g.width])
    g.add("near_dense", units=g.width, of=of)


def odd_weight(g: Growth) -> None:
    g.add(g.rng.choice(("overwritten", "overwritten", "idle")))


def odd_noise(g: Growth) -> None:
    g.add(g.rng.choice(("unordered_noise",) * 2 + ("tf_noise",)))


# How often each is drawn, beside those of `generate_layers.py`.
WIDE: list[tuple[int, Callable[[Growth], None]]] = [
    (5, state),
    (3, state_reader),
    (3, special),
    (4, lookup),
    (2, norm),
    (2, changed_dense),
    (2, near_dense),
    (2, odd_weight),
    (2, odd_noise),
]


def alike(rng: random.Random, growth: Growth, found: Options) -> None:
    """Equal blocks, a cell each, of layers that only their names tell apart."""
    kind = rng.choice((*sorted(SPECIAL), *("tf_noise",) * 6))
    count = rng.choice((3, 4, 4))  # the first and the last are like none
    for _ in range(count):
        growth.add(kind)
        growth.add("dense", units=growth.width)
    found["cells"] = (2,) * count
