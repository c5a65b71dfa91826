"""What all libraries compute: the sizes, first weights and data of the work.

Work A is Transformer blocks without a mask, B convolutions with batch
normalisation, C cells that only wait. The loss is the mean of the squares of
the outputs, and plain gradient descent reduces it. Everything is in float32 and
the same in each process that asks for it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

LEARNING_RATES = {"A": 0.001, "B": 0.5, "C": 0.001}
EPSILON = 1e-5  # of all normalisations
MOMENTUM = 0.9  # of the moving averages of batch normalisation

# Of a cell of work C. It waits a second time to recompute its forward pass.
FORWARD_SECONDS = 0.020
BACKWARD_SECONDS = 0.040

Weights = dict[str, np.ndarray]


class Transformer(NamedTuple):
    """The sizes of work A."""

    blocks: int = 8
    units: int = 256
    heads: int = 4
    hidden_units: int = 1024
    positions: int = 64
    batch_size: int = 32


class Convolutions(NamedTuple):
    """The sizes of work B."""

    channels: tuple[int, ...] = (
        *2 * (16,),
        *2 * (32,),
        *4 * (64,),
        *4 * (128,),
    )
    strides: tuple[int, ...] = (1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1)
    image_size: int = 32
    batch_size: int = 64


TRANSFORMER = Transformer()
CONVOLUTIONS = Convolutions()


def cuts(work: str, num_cells: int) -> list[tuple[int, int]]:
    """Where cells of nearly equal length begin and end in the layers."""
    num_layers = {
        "A": TRANSFORMER.blocks,
        "B": len(CONVOLUTIONS.channels),
        "C": num_cells,
    }[work]
    ends = [cell * num_layers // num_cells for cell in range(num_cells + 1)]
    return list(itertools.pairwise(ends))


def block_shapes() -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a block, kernels as (inputs, outputs).

    In the order in which `tools.bench.models.TransformerBlock` has them.
    """
    units, hidden = TRANSFORMER.units, TRANSFORMER.hidden_units
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in ("norm1", "norm2"):
        shapes |= {f"{norm}_weight": (units,), f"{norm}_bias": (units,)}
    square = ("query", "key", "value", "output")
    kernels = dict.fromkeys(square, (units, units))
    kernels |= {"wide": (units, hidden), "narrow": (hidden, units)}
    for name, shape in kernels.items():
        shapes |= {f"{name}_weight": shape, f"{name}_bias": shape[1:]}
    return shapes


def block_weights() -> list[Weights]:
    """The first weights of each block, by the names of `block_shapes`."""
    random = np.random.RandomState(1)

    def first(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 2:
            values = random.standard_normal(shape) / np.sqrt(shape[0])
            return values.astype(np.float32)
        is_scale = name.startswith("norm") and name.endswith("weight")
        return np.full(shape, float(is_scale), np.float32)

    return [
        {name: first(name, shape) for name, shape in block_shapes().items()}
        for _ in range(TRANSFORMER.blocks)
    ]


def kernels() -> list[np.ndarray]:
    """The first kernels of the convolutions, (3, 3, inputs, outputs)."""
    random = np.random.RandomState(2)
    channels = (3, *CONVOLUTIONS.channels)
    return [
        (
            random.standard_normal((3, 3, inputs, outputs))
            * np.sqrt(2 / (9 * inputs))
        ).astype(np.float32)
        for inputs, outputs in itertools.pairwise(channels)
    ]


def inputs(work: str, num_micro_batches: int) -> np.ndarray:
    """The mini-batch of every step."""
    if work == "C":
        return np.ones((4 * num_micro_batches, 1), np.float32)
    shape: tuple[int, ...] = (
        TRANSFORMER.batch_size,
        TRANSFORMER.positions,
        TRANSFORMER.units,
    )
    if work == "B":
        size = CONVOLUTIONS.image_size
        shape = (CONVOLUTIONS.batch_size, size, size, 3)
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)
