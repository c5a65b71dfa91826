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
NORMS: tuple[tuple[str, Options], ...] = (
    ("batch_norm", {"momentum": 0.8, "renorm": True}),
    ("batch_norm", {"momentum": 0.8, "scale": False}),
    ("batch_norm", {"momentum": 0.8, "center": False, "epsilon": 0.1}),
    ("unbiased_norm", {"momentum": 0.8}),
    ("warm_norm", {"momentum": 0.9}),
)
# Layers that keep any shape, with options.
SIMPLE: dict[str, Callable[[random.Random], Options]] = {
    "activation": lambda rng: {"activation": rng.choice(ACTIVATIONS)},
    "activity": lambda rng: {"l2": 0.05},
    "alpha_dropout": lambda rng: {"rate": 0.3},
    "batch_norm": lambda rng: {"momentum": 0.8},
    "branch": lambda rng: {},
    "choice": lambda rng: {},
    "dropout": lambda rng: {"rate": 0.4},
    "fixed": lambda rng: {
        "inner": rng.choice(NOISES),
        "value": rng.random() < 0.5,
    },
    "gaussian_dropout": lambda rng: {"rate": 0.3},
    "gaussian_noise": lambda rng: {"stddev": 0.1},
    "group_norm": lambda rng: {"groups": 1},
    "hidden": lambda rng: {"inner": rng.choice(NOISES)},
    "lambda": lambda rng: {
        "which": rng.choice(("double", "sine", "centre", "softly"))
    },
    "layer_norm": lambda rng: {},
    "leaky_relu": lambda rng: {},
    "noise": lambda rng: {"seed": rng.randrange(9)},
    "noise_of_shared_seeds": lambda rng: {},
    "penalty": lambda rng: {},
    "prelu": lambda rng: {},
    "rescaling": lambda rng: {"scale": 0.5},
    "rms_norm": lambda rng: {},
    "softmax": lambda rng: {},
    "unit_norm": lambda rng: {},
}
SAME = {"padding": "same"}
TWO = {"kernel_size": 2, **SAME}
HALF = {"pool_size": 2, **SAME}


@dataclasses.dataclass
class Growth:
    """What is known of the layers so far.

    Attributes:
        rng: Where choices come from.
        shape: Of a row.
        at: In a graph, what the next layer is called on.
        planned: What has to be added, at some time.
        specs: The layers.
        tensors: In a graph, what there is to call layers on, with its shape.
        known: Layers that others may call again or read, with the shape that
            they have seen, by what they are for.
        has_mask: Whether a mask travels along.
    """

    rng: random.Random
    shape: tuple[Any, ...]
    at: str = ""
    planned: list[Callable[[Growth], Any]] = dataclasses.field(
        default_factory=list
    )
    specs: list[Spec] = dataclasses.field(default_factory=list)
    tensors: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
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
        """Adds a layer, sometimes a frozen one; returns its name."""
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
        return (
            self.width if self.rng.random() < 0.7 else self.rng.choice((2, 3))
        )


# -------------------------------------------------------------------- any shape
def dense(g: Growth) -> None:
    options: Options = {"units": g.units()}
    if g.rng.random() < 0.5:
        options["activation"] = g.rng.choice(ACTIVATIONS)
    for name, choices in (
        ("kernel_regularizer", ("l1", "l2")),
        ("bias_regularizer", ("l2",)),
        ("activity_regularizer", ("l1", "l2")),
        ("kernel_constraint", ("max_norm", "non_neg", "unit_norm")),
    ):
        if g.rng.random() < 0.12:
            options[name] = g.rng.choice(choices)
    square = options["units"] == g.width
    name = g.add("dense", keeps=square, **options)
    g.shape = (*g.shape[:-1], options["units"])
    if square:
        g.note("square", name)


def simple(g: Growth) -> None:
    """One of the layers that keep any shape."""
    kind = g.rng.choice(sorted(SIMPLE))
    g.add(kind, **SIMPLE[kind](g.rng))


def counter(g: Growth) -> str:
    name = g.add("counter")
    g.known["counter"].append((name, g.shape))
    return name


def nested(g: Growth) -> None:
    kind = g.rng.choice(("block", "sequential", "functional"))
    inner = g.rng.choice((*NOISES, "layer_norm"))
    if kind == "block":
        g.add("block", inner=inner, units=g.width)
    elif kind == "functional":
        g.add("functional", shape=list(g.shape), inner=inner, units=g.width)
    else:
        within = Growth(g.rng, g.shape)
        for _ in range(g.rng.choice((1, 2, 3))):
            g.rng.choice((dense, simple))(within)
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
    if drawing and g.rng.random() < 0.5:
        same = drawing
    squares = g.seen("square", by_width=True)
    choices: list[tuple[str, list[str]]] = [
        ("again", same),
        ("tied", squares),
        ("closure", squares),
        ("tied_inner", g.seen("spectral", by_width=True)),
        ("count_reader", [name for name, _ in g.known["counter"]]),
    ]
    kind, names = g.rng.choice([c for c in choices if c[1]] or [("", [])])
    if names:
        g.add(kind, keeps=False, of=g.rng.choice(names))
    else:
        dense(g)


def complex_numbers(g: Growth) -> None:
    g.add("to_complex", keeps=False)
    for _ in range(g.rng.choice((0, 1, 2))):
        g.add("rotate", keeps=False)
    g.add("from_complex", keeps=False)


def nests(g: Growth) -> None:
    g.add("fork", keeps=False)
    for _ in range(g.rng.choice((0, 1, 2))):
        g.add("step", keeps=False, units=g.width)
    g.add("join", keeps=False)


def leaking(g: Growth) -> None:
    """A fixed `training`, and then layers that ask whether they train."""
    inner = g.rng.choice(("dropout", "gaussian_noise"))
    g.add("fixed", inner=inner, value=g.rng.random() < 0.3)
    g.rng.choice((dense, simple))(g)
    g.add("hidden", inner=inner)


def state(g: Growth) -> None:
    name = g.add(g.rng.choice(sorted(STATE)), reads=g.rng.choice(READS))
    g.note("state", name)


def state_reader(g: Growth) -> None:
    """Reads what an earlier layer keeps, at once or after another layer."""
    if not g.seen("state"):
        state(g)
        if g.rng.random() < 0.5:
            g.add("layer_norm")
    g.add("state_reader", keeps=False, of=g.rng.choice(g.seen("state")))


def norm(g: Growth) -> None:
    kind, options = g.rng.choice(NORMS)
    name = g.add(kind, **options)
    if g.rng.random() < 0.15:
        g.add("moments_reader", keeps=False, of=name)


def changed_dense(g: Growth) -> None:
    """Quantised, or with an adapter, or in a dtype of its own."""
    kind = g.rng.choice(("float8_dense", "int8_dense", "lora_dense", "dense"))
    if kind == "dense":
        dtype = g.rng.choice(("float32", "mixed_bfloat16"))
        g.add(kind, keeps=False, units=g.width, dtype=dtype)
    else:
        g.add(kind, units=g.width, width=g.width)


def near_dense(g: Growth) -> None:
    """Its regulariser reads another layer's kernel."""
    if not g.seen("square", by_width=True):
        g.note("square", g.add("dense", units=g.width))
    of = g.rng.choice(g.seen("square", by_width=True))
    g.add("near_dense", units=g.width, of=of)


def odd(g: Growth) -> None:
    kinds = ("overwritten", "idle", "unordered_noise", "tf_noise")
    g.add(g.rng.choices(kinds, (4, 2, 4, 2))[0])


# ------------------------------------------------------- vectors and positions
def early_reader(g: Growth) -> None:
    """A closure that reads a dense layer after it."""
    name = f"l{len(g.specs) + 1}"
    g.add("closure", keeps=False, of=name)
    options = {"units": g.width, "built": [None, g.width]}
    g.specs.append(Spec(name, "dense", options))


def spectral(g: Growth) -> str:
    name = g.add("spectral", units=g.width)
    g.note("spectral", name)
    if g.rng.random() < 0.5:
        g.add("tied_inner", keeps=False, of=name)
    return name


def counted(g: Growth) -> None:
    name = counter(g)
    if g.rng.random() < 0.5:
        dense(g)
    g.add("count_reader", keeps=False, of=name)


def positioned(g: Growth) -> None:
    """One of the layers that take sequences, or images."""
    units, sizes = g.units(), g.shape[:-1]
    half = tuple(-(-n // 2) for n in sizes)
    double = tuple(2 * n for n in sizes)
    # Of each kind: options, and the shape of outputs.
    filters = {"filters": units, **TWO}
    if len(sizes) == 2:
        kinds: dict[str, tuple[Options, tuple[int, ...]]] = {
            "conv_2d": (filters, (*sizes, units)),
            "depthwise_conv_2d": (TWO, g.shape),
            "upsampling_2d": ({"size": 2}, (*double, g.width)),
            "max_pooling_2d": (HALF, (*half, g.width)),
            "average_pooling_2d": (HALF, (*half, g.width)),
        }
    else:
        every = {"units": units, "return_sequences": True}
        dropout = {"dropout": g.rng.choice((0.0, 0.0, 0.3))}
        kinds = {
            "lstm": ({**every, **dropout}, (*sizes, units)),
            "gru": (every, (*sizes, units)),
            "simple_rnn": (every, (*sizes, units)),
            "bidirectional": ({"units": 2}, (*sizes, 4)),
            "self_attention": ({"width": 2, **dropout}, g.shape),
        }
        if not g.has_mask:  # convolutions and such do not take one
            kinds |= {
                "conv_1d": ({**filters, "padding": "causal"}, (*sizes, units)),
                "separable_conv_1d": (filters, (*sizes, units)),
                "time_distributed": ({"units": units}, (*sizes, units)),
                "spatial_dropout_1d": ({"rate": 0.4}, g.shape),
                "zero_padding_1d": ({"padding": 1}, (sizes[0] + 2, g.width)),
                "average_pooling_1d": (HALF, (*half, g.width)),
                "max_pooling_1d": (HALF, (*half, g.width)),
                "upsampling_1d": ({"size": 2}, (*double, g.width)),
                "masking": ({}, g.shape),
            }
    kind = g.rng.choice(sorted(kinds))
    options, shape = kinds[kind]
    g.add(kind, keeps=shape == g.shape, **options)
    g.shape = shape


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
        g.shape = (g.width,)
    g.has_mask = False


Draw = tuple[int, Callable[[Growth], Any]]
# How often each is drawn, beside the others that take the same shape.
ANY: list[Draw] = [
    (6, dense),
    (8, simple),
    (4, shared),
    (3, nested),
    (1, counter),
    (1, complex_numbers),
    (1, nests),
    (1, lambda g: g.add("rematerialized", units=g.width)),
    (1, leaking),
    (5, state),
    (3, state_reader),
    (3, lambda g: g.add(g.rng.choice(sorted(SPECIAL)))),
    (4, lambda g: g.add("lookup", by=g.rng.choice(LOOKS))),
    (2, norm),
    (2, changed_dense),
    (2, near_dense),
    (3, odd),
]
BY_RANK: dict[int, list[Draw]] = {
    1: [(1, spectral), (1, counted), (1, early_reader)],
    2: [(6, positioned), (1, summarise)],
    3: [(8, positioned), (2, summarise)],
}


def _next(g: Growth, choices: list[Draw]) -> None:
    weights, functions = zip(*choices, strict=True)
    g.rng.choices(functions, weights)[0](g)


def grow(g: Growth, count: int) -> None:
    """Adds about so many layers to a list."""
    for i in range(count):
        if not g.add_planned(is_last=i == count - 1):
            _next(g, [*ANY, *BY_RANK[len(g.shape)]])


def alike(g: Growth, found: Options) -> None:
    """Equal blocks, a cell each, of layers that only their names tell apart."""
    kind = g.rng.choice((*sorted(SPECIAL), *("tf_noise",) * 6))
    count = g.rng.choice((3, 4, 4))  # the first and the last are like none
    for _ in range(count):
        g.add(kind)
        g.add("dense", units=g.width)
    found["cells"] = (2,) * count


# ----------------------------------------------------------------------- graphs
def grow_graph(g: Growth, count: int, is_first: bool) -> None:
    """Calls about so many layers, each on some tensor; joins loose ends."""
    for i in range(count):
        recent = g.tensors[-3:]
        g.at, g.shape = g.rng.choice((*g.tensors, *recent))
        if not g.add_planned(is_first or i == count - 1):
            is_sequence = len(g.shape) == 2 and g.shape[0]
            choices = [*ANY, *GRAPH]
            _next(g, choices + [(2, positioned)] * bool(is_sequence))
        g.tensors.append((g.at, g.shape))
    taken = {name for spec in g.specs for name in spec.takes}
    ends = []
    for name, shape in g.tensors:
        if name not in taken:
            g.at, g.shape = name, shape
            if len(shape) == 2:
                g.add("global_average_1d", keeps=False)
                g.shape = shape[-1:]
            ends.append((g.at, g.shape))
    if len(ends) > 1:
        takes = tuple(name for name, _ in ends)
        g.add("concatenate", keeps=False, takes=takes)
        g.shape = (sum(shape[-1] for _, shape in ends),)


def read_aside(g: Growth) -> None:
    """A branch that reads what a longer one keeps.

    Its end comes first, so that it is run first where only bytes count.
    """
    start = g.tensors[0]
    g.at, g.shape = start
    name = g.add(g.rng.choice(sorted(STATE)))
    for _ in range(2):
        g.add("layer_norm")
    longer = g.at, g.shape
    g.at = start[0]
    g.add("state_reader", keeps=False, of=name)
    g.tensors[1:1] = [(g.at, g.shape), longer]


def merge(g: Growth) -> None:
    """Two tensors of one shape, or of one length."""
    kind = g.rng.choice(("add", "add", "multiply", "concatenate"))
    joins = kind == "concatenate"
    end = -1 if joins else None
    others = [
        (name, shape)
        for name, shape in g.tensors
        if name != g.at and shape[:end] == g.shape[:end]
    ]
    if not others:
        return operation(g)
    other, shape = g.rng.choice(others)
    g.add(kind, keeps=False, takes=(g.at, other))
    if joins:
        g.shape = (*g.shape[:-1], g.width + shape[-1])


def operation(g: Growth) -> None:
    which = g.rng.choice(("sine", "centre", "softly"))
    g.add("op", keeps=False, which=which)


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


GRAPH: list[Draw] = [(6, merge), (3, operation), (5, model), (3, beside)]


def shape_of(found: Options) -> tuple[Any, ...]:
    """The shape of a row of inputs."""
    shape: tuple[Any, ...] = SHAPES.get(found["inputs"], (4,))
    return (None, *shape[1:]) if "length" in found else shape
