"""Draws layers that fit together: a list, or a graph, that grows.

While it does, its `Growth` knows the shape of a row, and what may be shared or
read. What comes next is drawn of all kinds that take this shape.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

from case import Options, Spec
from data_sources import SHAPES
from grouping import RANDOM
from special_layers import CLASSES as SPECIAL
from state_layers import CLASSES as STATE

# What makes no new layer, or takes no argument of one.
NO_LAYERS = {"again", "closure", "inner_of", "model", "op", "plus"}
ACTIVATIONS = ("relu", "tanh", "gelu", "sigmoid", "linear", "softplus")
DRAWING = RANDOM - {"batch_norm"}
NOISES = ("dropout", "gaussian_noise", "batch_norm")
READS = ("none", "before", "after", "after")
LOOKS = ("inputs", "constants", "both", "draws", "draws", "drawn rows")
ANY = (True, False)
UNITS = {"units": "width"}


@dataclasses.dataclass
class Growth:
    """What is known of the layers so far."""

    rng: random.Random
    found: Options  # the rest of the case
    shape: tuple[Any, ...]  # of a row
    at: str = ""  # in a graph, what the next layer is called on
    # What has to be added, at some time.
    planned: list[Any] = dataclasses.field(default_factory=list)
    specs: list[Spec] = dataclasses.field(default_factory=list)
    # In a graph, what there is to call layers on, with its shape.
    tensors: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    # Layers that others may call again or read, with the shape that they have
    # seen, by what they are for.
    known: Any = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    has_mask: bool = False

    @property
    def width(self) -> int:
        return self.shape[-1]

    def add(
        self,
        kind: str,
        keeps: bool = True,
        takes: tuple[str, ...] = (),
        **options: Any,
    ) -> str:
        """Adds a layer, sometimes a frozen one; returns its name.

        Of tuples a value is drawn, and "width" is that of the shape.
        """
        for key, value in options.items():
            if isinstance(value, tuple):
                options[key] = self.rng.choice(value)
            elif value == "width":
                options[key] = self.width
        name = f"l{len(self.specs)}"
        if kind not in NO_LAYERS and self.rng.random() < 0.08:
            options["frozen"] = True
        if self.at:
            takes, self.at = takes or (self.at,), name
        self.specs.append(Spec(name, kind, options, takes))
        if keeps:
            self.note("keeping", name)
        return name

    def add_planned(self, is_last: bool = False) -> bool:
        """At times, and at last, adds what has to be; says whether it did."""
        if self.planned and (is_last or self.rng.random() < 0.4):
            self.planned.pop()(self)
            return True
        return False

    def note(self, what: str, name: str) -> None:
        self.known[what].append((name, self.shape))

    def seen(self, what: str, by_width: bool = False) -> list[str]:
        """Names of those that have seen this shape, or width."""
        return [
            name
            for name, shape in self.known[what]
            if shape == self.shape or (by_width and shape[-1] == self.width)
        ]

    def units(self) -> int:
        """The width again, mostly, so that layers can share."""
        other = self.rng.random() < 0.3
        return self.rng.choice((2, 3)) if other else self.width


def layer(kind: str, *notes: str, **options: Any) -> Callable[[Growth], str]:
    """Returns what adds a layer, and notes what it is for."""

    def add(g: Growth) -> str:
        name = g.add(kind, **options)
        for note in notes:
            g.note(note, name)
        return name

    return add


# -------------------------------------------------------------------- any shape
def dense(g: Growth) -> None:
    options: Options = {"units": g.units()}
    for name, share, choices in (
        ("activation", 0.5, ACTIVATIONS),
        ("kernel_regularizer", 0.12, ("l1", "l2")),
        ("bias_regularizer", 0.12, ("l2",)),
        ("activity_regularizer", 0.12, ("l1", "l2")),
        ("kernel_constraint", 0.12, ("max_norm", "non_neg", "unit_norm")),
    ):
        if g.rng.random() < share:
            options[name] = choices
    square = options["units"] == g.width
    name = g.add("dense", keeps=square, **options)
    g.shape = (*g.shape[:-1], options["units"])
    if square:
        g.note("square", name)


def sequential(g: Growth) -> None:
    within = Growth(g.rng, g.found, g.shape)
    simple = [draw for draw in KEEPING if draw[0] == 1]
    for _ in range(g.rng.choice((1, 2, 3))):
        grow_one(within, [(24, dense), *simple])
    prefix = f"l{len(g.specs)}_"
    layers = [
        {"name": prefix + s.name, "kind": s.kind, "options": s.options}
        for s in within.specs
    ]
    g.add("sequential", keeps=within.shape == g.shape, layers=layers)
    g.shape = within.shape


def shared(g: Growth) -> None:
    """A layer again, or one that reads another one's weight."""
    same = g.seen("keeping")
    kinds = {spec.name: spec.kind for spec in g.specs}
    drawing = [name for name in same if kinds[name] in DRAWING]
    squares = g.seen("square", by_width=True)
    choices: list[tuple[str, list[str]]] = [
        ("again", drawing if g.rng.random() < 0.5 else same),
        ("tied", squares),
        ("closure", squares),
        ("near_dense", squares),
        ("tied_inner", g.seen("spectral", by_width=True)),
        ("count_reader", [name for name, _ in g.known["counter"]]),
    ]
    choices = [choice for choice in choices if choice[1]]
    if not choices:
        return dense(g)
    kind, names = g.rng.choice(choices)
    options = UNITS if kind == "near_dense" else {}
    g.add(kind, keeps=False, of=tuple(names), **options)


def around(first: str, middle: str, last: str, **options: Any) -> Any:
    """Returns what adds two layers, and some between them."""

    def add(g: Growth) -> None:
        g.add(first, keeps=False)
        for _ in range(g.rng.choice((0, 1, 2))):
            g.add(middle, keeps=False, **options)
        g.add(last, keeps=False)

    return add


def state_reader(g: Growth) -> None:
    """Reads what an earlier layer keeps, at once or after another layer."""
    if not g.seen("state"):
        kind = g.rng.choice(sorted(STATE))
        layer(kind, "state", reads=READS)(g)
        if g.rng.random() < 0.5:
            g.add("layer_norm")
    g.add("state_reader", keeps=False, of=tuple(g.seen("state")))


def norm(g: Growth) -> None:
    """A batch normalisation, with what reads its moments."""
    kind = g.rng.choice(("batch_norm", "unbiased_norm", "warm_norm"))
    name = g.add(kind, momentum=0.8, scale=ANY, center=ANY)
    if g.rng.random() < 0.15:
        g.add("moments_reader", keeps=False, of=name)


# ------------------------------------------------------- vectors and positions
def spectral(g: Growth) -> None:
    name = layer("spectral", "spectral", units="width")(g)
    if g.rng.random() < 0.5:
        g.add("tied_inner", keeps=False, of=name)


def positioned(g: Growth) -> None:
    """One of the layers that take sequences, or images."""
    units, sizes = g.units(), g.shape[:-1]
    half, double = [-(-n // 2) for n in sizes], [2 * n for n in sizes]
    same: Options = {"padding": "same"}
    pool = {"pool_size": 2, **same}
    filters = {"filters": units, "kernel_size": 2, **same}
    dropout = {"dropout": g.rng.choice((0.0, 0.0, 0.3))}
    every = {"units": units, "return_sequences": True}
    d = len(sizes)
    # Of each kind: options, and the shape of outputs.
    kinds: dict[str, tuple[Options, list[int]]] = {
        f"conv_{d}d": (filters, [*sizes, units]),
        f"upsampling_{d}d": ({"size": 2}, [*double, g.width]),
        f"max_pooling_{d}d": (pool, [*half, g.width]),
        f"average_pooling_{d}d": (pool, [*half, g.width]),
    }
    if d == 2:
        depthwise = {"kernel_size": 2, **same}
        kinds["depthwise_conv_2d"] = depthwise, [*g.shape]
    else:
        kinds |= {
            "separable_conv_1d": (filters, [*sizes, units]),
            "time_distributed": ({"units": units}, [*sizes, units]),
            "spatial_dropout_1d": ({"rate": 0.4}, [*g.shape]),
            "zero_padding_1d": ({"padding": 1}, [sizes[0] + 2, g.width]),
            "masking": ({}, [*g.shape]),
        }
        if g.has_mask:  # which these do not take
            kinds = {}
        kinds |= {
            "lstm": ({**every, **dropout}, [*sizes, units]),
            "gru": (every, [*sizes, units]),
            "simple_rnn": (every, [*sizes, units]),
            "bidirectional": ({"units": 2}, [*sizes, 4]),
            "self_attention": ({"width": 2, **dropout}, [*g.shape]),
        }
    kind = g.rng.choice(sorted(kinds))
    options, shape = kinds[kind]
    g.add(kind, keeps=shape == [*g.shape], **options)
    g.shape = tuple(shape)


def summarise(g: Growth) -> None:
    """From positions to one vector a row."""
    rank = len(g.shape)
    if rank == 2 and g.rng.random() < 0.3:
        units = g.units()
        g.add("lstm", keeps=False, units=units)
        g.shape = (units,)
    elif g.rng.random() < 0.3 and not g.has_mask:
        g.add("flatten", keeps=False)
        g.shape = (math.prod(g.shape),)
    else:
        kind = g.rng.choice(("global_average", "global_max"))
        g.add(f"{kind}_{rank - 1}d", keeps=False)
        g.shape = g.shape[-1:]
    g.has_mask = False


Draw = tuple[float, Callable[[Growth], Any]]
# How often each is drawn, beside the others that take the same shape.
KEEPING: list[Draw] = [
    (1, layer("activation", activation=ACTIVATIONS)),
    (1, layer("activity", l2=0.05)),
    (1, layer("alpha_dropout", rate=0.3)),
    (1, layer("batch_norm", momentum=0.8)),
    (1, layer("branch")),
    (1, layer("choice")),
    (1, layer("dropout", rate=0.4)),
    (1, layer("fixed", inner=NOISES, value=ANY)),
    (1, layer("gaussian_dropout", rate=0.3)),
    (1, layer("gaussian_noise", stddev=0.1)),
    (1, layer("group_norm", groups=1)),
    (1, layer("hidden", inner=NOISES)),
    (1, layer("lambda", which=("double", "sine", "centre", "softly"))),
    (1, layer("layer_norm")),
    (1, layer("leaky_relu")),
    (1, layer("noise", seed=tuple(range(9)))),
    (1, layer("noise_of_shared_seeds")),
    (1, layer("penalty")),
    (1, layer("prelu")),
    (1, layer("rescaling", scale=0.5)),
    (1, layer("rms_norm")),
    (1, layer("softmax")),
    (1, layer("unit_norm")),
    *((2, layer(kind, "state", reads=READS)) for kind in sorted(STATE)),
    *((3, layer(kind)) for kind in sorted(SPECIAL)),
    (12, layer("lookup", by=LOOKS)),
    (3, layer("block", inner=(*NOISES, "layer_norm"), **UNITS)),
    (3, layer("counter", "counter")),
    (3, layer("rematerialized", **UNITS)),
    *(
        (2, layer(f"{change}_dense", width="width", **UNITS))
        for change in ("float8", "int8", "lora")
    ),
    (2, layer("dense", dtype=("float32", "mixed_bfloat16"), **UNITS)),
    (3, layer("overwritten")),
    (1.5, layer("idle")),
    (3, layer("unordered_noise")),
    (1.5, layer("tf_noise")),
]
EVERY: list[Draw] = [
    *KEEPING,
    (18, dense),
    (12, shared),
    (6, sequential),
    (3, around("to_complex", "rotate", "from_complex")),
    (3, around("fork", "step", "join", **UNITS)),
    (9, state_reader),
    (6, norm),
]
BY_RANK: dict[int, list[Draw]] = {
    1: [(6, spectral)],
    2: [(18, positioned), (3, summarise)],
    3: [(24, positioned), (6, summarise)],
}


def grow_one(g: Growth, choices: list[Draw]) -> None:
    weights, functions = zip(*choices, strict=True)
    g.rng.choices(functions, weights)[0](g)


def grow(g: Growth, count: int) -> None:
    """Adds about so many layers to a list."""
    for i in range(count):
        if not g.add_planned(is_last=i == count - 1):
            grow_one(g, [*EVERY, *BY_RANK[len(g.shape)]])


def alike(g: Growth) -> None:
    """Equal blocks, a cell each, of layers that only their names tell apart."""
    kind = g.rng.choice((*sorted(SPECIAL), *("tf_noise",) * 6))
    count = g.rng.choice((3, 4, 4))  # the first and the last are like none
    for _ in range(count):
        g.add(kind)
        g.add("dense", units="width")
    g.found["cells"] = (2,) * count


# ----------------------------------------------------------------------- graphs
def grow_graph(g: Growth, count: int, is_first: bool) -> None:
    """Calls about so many layers, each on some tensor; joins loose ends."""
    for i in range(count):
        recent = g.tensors[-3:]
        g.at, g.shape = g.rng.choice((*g.tensors, *recent))
        if not g.add_planned(is_first or i == count - 1):
            is_sequence = len(g.shape) == 2 and g.shape[0]
            grow_one(g, EVERY + GRAPH + [(6, positioned)] * bool(is_sequence))
        g.tensors.append((g.at, g.shape))
    taken = {name for spec in g.specs for name in spec.takes}
    ends = []
    for name, shape in g.tensors:
        if name not in taken:
            g.at, g.shape = name, shape
            if len(shape) == 2:
                g.add("global_average_1d", keeps=False)
                g.shape = g.shape[-1:]
            ends.append((g.at, g.width))
    g.at, width = ends[-1]
    if len(ends) > 1:
        takes = tuple(name for name, _ in ends)
        g.add("concatenate", keeps=False, takes=takes)
        width = sum(width for _, width in ends)
    g.shape = (width,)


def merge(g: Growth) -> None:
    """Two tensors of one shape, or of one length."""
    kind = g.rng.choice(("add", "add", "multiply", "concatenate"))
    end = -1 if kind == "concatenate" else None
    others = [
        (name, shape)
        for name, shape in g.tensors
        if name != g.at and shape[:end] == g.shape[:end]
    ]
    if not others:
        return operation(g)
    other, shape = g.rng.choice(others)
    g.add(kind, keeps=False, takes=(g.at, other))
    if kind == "concatenate":
        g.shape = (*g.shape[:-1], g.width + shape[-1])


def operation(g: Growth) -> None:
    g.add("op", keeps=False, which=("sine", "centre", "softly"))


def model(g: Growth) -> None:
    """A model of tensors that this graph has too, called on another one."""
    sources = {name: {name} for name, _ in g.tensors if name[0] == "x"}
    for spec in g.specs:
        inputs = (sources[name] for name in spec.takes)
        sources[spec.name] = set().union(*inputs)
    shapes = dict(g.tensors)
    lasts = [
        (name, shape, *sources[name])
        for name, shape in g.tensors
        if len(sources[name]) == 1 and name not in sources[name]
    ]
    lasts = [last for last in lasts if shapes[last[2]] == g.shape]
    if not lasts:
        return merge(g)
    last, shape, first = g.rng.choice(lasts)
    g.add("model", keeps=shape == g.shape, first=first, last=last)
    g.shape = shape


GRAPH: list[Draw] = [(18, merge), (9, operation), (15, model)]


def shape_of(found: Options) -> tuple[Any, ...]:
    """The shape of a row of inputs."""
    shape: tuple[Any, ...] = SHAPES.get(found["inputs"], (4,))
    return (None, *shape[1:]) if "length" in found else shape
