"""Draws lists of layers that fit together.

While a list grows, its `Growth` knows the shape of a row, and what may be
shared or read. What comes next is drawn of all kinds that take this shape.
"""

from __future__ import annotations

from collections.abc import Callable

from case import Options, Spec
from generate_wide import WIDE
from grouping import RANDOM
from grow_positions import image, sequence, summarise
from growth import Growth

ACTIVATIONS = ("relu", "tanh", "gelu", "sigmoid", "linear", "softplus")
DRAWING = RANDOM - {"batch_norm"}
NOISES = ("dropout", "gaussian_noise", "batch_norm")


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
    if kind == "branch" and len(g.specs) % 2:
        kinds, kind = {"choice": {}}, "choice"  # one that is not refused
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
    kinds = {spec.name: spec.kind for spec in g.specs}
    drawing = [name for name in same if kinds[name] in DRAWING]
    if drawing and g.rng.random() < 0.5:
        same = drawing
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


def leaking(g: Growth) -> None:
    """A fixed `training`, and then layers that ask whether they train."""
    inner = g.rng.choice(("dropout", "gaussian_noise"))
    g.add("fixed", inner=inner, value=g.rng.random() < 0.3)
    g.rng.choice((dense, simple))(g)
    g.add("hidden", inner=inner)


def own_remat(g: Growth) -> None:
    g.add("rematerialized", units=g.width)


# How often each is drawn, beside the others that take the same shape.
ANY: list[tuple[int, Callable[[Growth], None]]] = [
    (6, dense),
    (8, simple),
    (4, shared),
    (3, nested),
    (1, complex_numbers),
    (1, nests),
    (1, own_remat),
    (1, leaking),
]
VECTOR = [(1, spectral), (1, counted), (1, early_reader)]


def grow(g: Growth, count: int) -> None:
    """Adds about so many layers."""
    for i in range(count):
        if g.add_planned(is_last=i == count - 1):
            continue
        choices = [*ANY, *(WIDE if g.is_wide else ())]
        if len(g.shape) == 1:
            choices += VECTOR
        elif len(g.shape) == 2:
            choices += [(6, sequence), (1, summarise)]
        else:
            choices += [(8, image), (2, summarise)]
        weights, functions = zip(*choices, strict=True)
        g.rng.choices(functions, weights)[0](g)
