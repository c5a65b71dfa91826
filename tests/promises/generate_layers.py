"""Draws lists of layers that fit together.

While a list grows, its `Growth` knows the shape of a row, and what may be
shared or read. What comes next is drawn of all kinds that take this shape.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from case import Options, Spec

ACTIVATIONS = ("relu", "tanh", "gelu", "sigmoid", "linear", "softplus")
NOISES = ("dropout", "gaussian_noise", "batch_norm")
# Inference and training differ, or micro-batches see less than a mini-batch.
RANDOM = {
    "alpha_dropout",
    "batch_norm",
    "branch",
    "dropout",
    "gaussian_dropout",
    "gaussian_noise",
    "noise",
    "noise_of_shared_seeds",
    "spatial_dropout_1d",
}


@dataclasses.dataclass
class Growth:
    """What is known of the list so far.

    Attributes:
        rng: Where choices come from.
        shape: Of a row.
        specs: The layers.
        state: "tensor", "nest" or "complex".
        squares: Names of dense layers, by their units.
        spectrals: Those of `SpectralNormalization`, by units.
        keeping: Layers that keep the shape and may be listed again, with it.
        counters: Names of step counters.
        has_mask: Whether a mask travels along.
    """

    rng: random.Random
    shape: tuple[int, ...]
    specs: list[Spec] = dataclasses.field(default_factory=list)
    state: str = "tensor"
    squares: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    spectrals: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    keeping: list[tuple[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )
    counters: list[str] = dataclasses.field(default_factory=list)
    has_mask: bool = False

    @property
    def width(self) -> int:
        return self.shape[-1]

    def add(self, kind: str, keeps: bool = True, **options: Any) -> str:
        """Adds a layer, sometimes a frozen one; returns its name."""
        name = f"l{len(self.specs)}"
        if kind not in ("again", "closure") and self.rng.random() < 0.08:
            options["frozen"] = True
        self.specs.append(Spec(name, kind, options))
        if keeps:
            self.keeping.append((name, self.shape))
        return name

    def units(self) -> int:
        """The width again, mostly, so that layers can share."""
        return (
            self.width if self.rng.random() < 0.7 else self.rng.choice((2, 3))
        )


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
        g.squares.setdefault(g.width, []).append(name)


def simple(g: Growth) -> None:
    """One of the layers that keep any shape."""
    kinds: dict[str, Options] = {
        "activation": {"activation": g.rng.choice(ACTIVATIONS)},
        "activity": {"l2": 0.05},
        "alpha_dropout": {"rate": 0.3},
        "batch_norm": {"momentum": 0.8},
        "dropout": {"rate": 0.4},
        "gaussian_dropout": {"rate": 0.3},
        "gaussian_noise": {"stddev": 0.1},
        "group_norm": {"groups": 1},
        "layer_norm": {},
        "leaky_relu": {},
        "penalty": {},
        "prelu": {},
        "rescaling": {"scale": 0.5},
        "rms_norm": {},
        "softmax": {},
        "unit_norm": {},
        "counter": {},
        "noise": {"seed": g.rng.randrange(9)},
        "noise_of_shared_seeds": {},
        "branch": {},
        "lambda": {
            "which": g.rng.choice(("double", "sine", "centre", "softly"))
        },
        "fixed": {
            "inner": g.rng.choice(NOISES),
            "value": g.rng.random() < 0.5,
        },
        "hidden": {"inner": g.rng.choice(NOISES)},
    }
    kind = g.rng.choice(sorted(kinds))
    name = g.add(kind, **kinds[kind])
    if kind == "counter":
        g.counters.append(name)


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
    same = [name for name, shape in g.keeping if shape == g.shape]
    choices: list[tuple[str, list[str]]] = [
        ("again", same),
        ("tied", g.squares.get(g.width, [])),
        ("closure", g.squares.get(g.width, [])),
        ("tied_inner", g.spectrals.get(g.width, [])),
        ("count_reader", g.counters),
    ]
    kind, names = g.rng.choice([c for c in choices if c[1]] or [("", [])])
    if names:
        g.add(kind, keeps=False, of=g.rng.choice(names))
    else:
        dense(g)


def early_reader(g: Growth) -> None:
    """A closure that reads a dense layer after it."""
    width, number = g.width, len(g.specs)
    g.add("closure", keeps=False, of=f"l{number + 1}")
    g.specs.append(
        Spec(
            f"l{number + 1}", "dense", {"units": width, "built": [None, width]}
        )
    )


def spectral(g: Growth) -> None:
    name = g.add("spectral", units=g.width)
    g.spectrals.setdefault(g.width, []).append(name)
    if g.rng.random() < 0.5:
        g.add("tied_inner", keeps=False, of=name)


def counted(g: Growth) -> None:
    name = g.add("counter")
    g.counters.append(name)
    if g.rng.random() < 0.5:
        dense(g)
    g.add("count_reader", keeps=False, of=name)


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


def own_remat(g: Growth) -> None:
    g.add("rematerialized", units=g.width)


def sequence(g: Growth) -> None:
    length, width = g.shape
    units = g.units()
    plain: dict[str, tuple[Options, tuple[int, ...]]] = {
        "lstm": (
            {"units": units, "return_sequences": True},
            (length, units),
        ),
        "gru": ({"units": units, "return_sequences": True}, (length, units)),
        "simple_rnn": (
            {"units": units, "return_sequences": True},
            (length, units),
        ),
        "bidirectional": ({"units": 2}, (length, 4)),
        "conv_1d": (
            {"filters": units, "kernel_size": 2, "padding": "causal"},
            (length, units),
        ),
        "separable_conv_1d": (
            {"filters": units, "kernel_size": 2, "padding": "same"},
            (length, units),
        ),
        "self_attention": (
            {"width": 2, "dropout": g.rng.choice((0.0, 0.0, 0.3))},
            g.shape,
        ),
        "time_distributed": ({"units": units}, (length, units)),
        "spatial_dropout_1d": ({"rate": 0.4}, g.shape),
        "zero_padding_1d": ({"padding": 1}, (length + 2, width)),
        "average_pooling_1d": (
            {"pool_size": 2, "padding": "same"},
            (-(-length // 2), width),
        ),
        "max_pooling_1d": (
            {"pool_size": 2, "padding": "same"},
            (-(-length // 2), width),
        ),
        "upsampling_1d": ({"size": 2}, (2 * length, width)),
        "masking": ({}, g.shape),
    }
    kinds = sorted(plain)
    if g.has_mask:  # convolutions and such do not take one
        kinds = ["lstm", "gru", "simple_rnn", "bidirectional", "self_attention"]
    kind = g.rng.choice(kinds)
    options, shape = plain[kind]
    g.add(kind, keeps=shape == g.shape, **options)
    g.shape = shape


def image(g: Growth) -> None:
    high, wide, channels = g.shape
    filters = g.units()
    plain: dict[str, tuple[Options, tuple[int, ...]]] = {
        "conv_2d": (
            {"filters": filters, "kernel_size": 2, "padding": "same"},
            (high, wide, filters),
        ),
        "depthwise_conv_2d": (
            {"kernel_size": 2, "padding": "same"},
            g.shape,
        ),
        "upsampling_2d": ({"size": 2}, (2 * high, 2 * wide, channels)),
        "max_pooling_2d": (
            {"pool_size": 2, "padding": "same"},
            (-(-high // 2), -(-wide // 2), channels),
        ),
        "average_pooling_2d": (
            {"pool_size": 2, "padding": "same"},
            (-(-high // 2), -(-wide // 2), channels),
        ),
    }
    kind = g.rng.choice(sorted(plain))
    options, shape = plain[kind]
    g.add(kind, keeps=shape == g.shape, **options)
    g.shape = shape


def summarise(g: Growth) -> None:
    """From positions to one vector a row."""
    rank = len(g.shape)
    kinds = {2: "1d", 3: "2d"}[rank]
    kind = g.rng.choice((f"global_average_{kinds}", f"global_max_{kinds}"))
    if rank == 2 and g.rng.random() < 0.3:
        units = g.units()
        g.add("lstm", keeps=False, units=units)
        g.shape = (units,)
    elif g.rng.random() < 0.3 and not g.has_mask:
        size = 1
        for n in g.shape:
            size *= n
        g.add("flatten", keeps=False)
        g.shape = (size,)
    else:
        g.add(kind, keeps=False)
        g.shape = (g.width,)
    g.has_mask = False


# How often each is drawn, beside the others that take the same shape.
ANY: list[tuple[int, Callable[[Growth], None]]] = [
    (6, dense),
    (8, simple),
    (4, shared),
    (3, nested),
    (1, complex_numbers),
    (1, nests),
    (1, own_remat),
]
VECTOR = [(1, spectral), (1, counted), (1, early_reader)]


def grow(g: Growth, count: int) -> None:
    """Adds about so many layers."""
    for _ in range(count):
        choices = list(ANY)
        if len(g.shape) == 1:
            choices += VECTOR
        elif len(g.shape) == 2:
            choices += [(6, sequence), (1, summarise)]
        else:
            choices += [(8, image), (2, summarise)]
        weights, functions = zip(*choices, strict=True)
        g.rng.choices(functions, weights)[0](g)
