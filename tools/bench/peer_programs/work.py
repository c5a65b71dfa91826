"""The work of all programs: Transformer blocks, their first weights and data.

The blocks have no mask. The loss is the mean of the squares of the outputs, and
plain gradient descent reduces it. Everything is in float32 and the same in each
process that asks for it.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tools.bench.memory_worker import peak_of
from tools.bench.protocol import respond

LEARNING_RATE = 0.001
EPSILON = 1e-5  # of all normalisations
_FIRST_STEPS = 3

Weights = dict[str, np.ndarray]


class Transformer(NamedTuple):
    """The sizes."""

    blocks: int = 8
    units: int = 256
    heads: int = 4
    hidden_units: int = 1024
    positions: int = 64
    batch_size: int = 32


TRANSFORMER = Transformer()


class Order(NamedTuple):
    """What a program is to do: `k` cells, `m` micro-batches.

    One thread is a device. `schedule` may be "interleaved", with two cells a
    device. The backward pass recomputes.
    """

    k: int
    m: int
    schedule: str
    is_compiled: bool

    @property
    def chunks(self) -> int:
        """Returns the number of cells of a device."""
        return 2 if self.schedule == "interleaved" and self.k > 1 else 1

    def cuts(self) -> list[tuple[int, int]]:
        """Returns where cells of nearly equal length begin and end."""
        count = self.k * self.chunks
        ends = [i * TRANSFORMER.blocks // count for i in range(count + 1)]
        return list(itertools.pairwise(ends))


def read_order() -> Order:
    """Reads an order, JSON, from the command line."""
    return Order(**json.loads(sys.argv[1]))


def block_shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight, kernels as (inputs, outputs).

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
    """Returns the first weights of each block, by name."""
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


def inputs() -> np.ndarray:
    """Returns the mini-batch of every step."""
    sizes = TRANSFORMER
    shape = sizes.batch_size, sizes.positions, sizes.units
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def serve(
    step: Callable[[], float],
    peaks: Callable[[], Sequence[float]] | None = None,
    **facts: Any,
) -> None:
    """Does the first steps, and then what it is asked for, until "quit"."""

    def timed() -> dict[str, float]:
        start = time.perf_counter()
        loss = step()
        return {"s": time.perf_counter() - start, "loss": loss}

    def memory() -> dict[str, float]:
        return {"mib": sum(peaks() if peaks else [peak_of(step)])}

    losses = [step() for _ in range(_FIRST_STEPS)]
    respond({"losses": losses, **facts}, {"step": timed, "mem": memory})
