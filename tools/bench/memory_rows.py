"""Rows of the tables of `tools.bench memory`, and its search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.bench.memory_trial import Job, Outcome


def largest(
    fits: Callable[[int], bool], guess: int, tolerance: float = 0
) -> int:
    """The largest number for which something fits, by doubling and bisection.

    Args:
        fits: Whether it does. True up to some number, and False above.
        guess: Where to begin. Positive. A good guess saves trials.
        tolerance: How far below the result may be, relative to it.

    Returns:
        The number; 0 if not even 1 fits.

    Example:

    >>> largest(lambda n: n <= 100, guess=7)
    100
    """
    low, high = 0, 0  # the largest that fits, the smallest that does not
    step, number = max(1, int(tolerance * guess)), guess
    while not (low and high) and high != 1:
        if fits(number):
            low, number = number, number + step
        else:
            high, number = number, max(number - step, 1)
        step *= 2
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def name_of(job: Job) -> str:
    """The method, as in the paper's table."""
    return f"pipeline-{job.k}" if job.k else "naive"


def by_model(job: Job, layer_mib: float) -> float:
    """The paper's N + L/K N/M, in MiB.

    Args:
        job: A pipeline.
        layer_mib: What naive keeps of a mini-batch for a layer.

    Example:

    >>> from tools.bench.memory_trial import Size
    >>> size = Size(width=64, sequence=64, batch_size=256)  # N is 4 MiB
    >>> by_model(Job(size, num_layers=12, k=4, m=8), layer_mib=16.0)
    10.0
    """
    layers = -(-job.num_layers // job.k)
    return job.size.boundary_mib + layers * layer_mib / job.m


def uses_of(outcome: Outcome) -> dict[str, float]:
    """For each use of the memory that of the accelerator with most of it."""
    names = ("held", "gradients", "activations", "other")
    return {f"{name}_mib": outcome.most(name) for name in names}


def row_of(
    job: Job, outcome: Outcome, naive: dict[str, Any] | None
) -> dict[str, Any]:
    """A method's row.

    Args:
        job: What was trained.
        outcome: How it went.
        naive: The row of plain Keras, None if this is it or there is none.
    """
    row = {
        "method": name_of(job),
        "k": job.k,
        "m": job.m,
        "layers": job.num_layers,
        "parameters": outcome.num_parameters,
        **uses_of(outcome),
    }
    if naive is not None:
        for key in ("layers", "parameters", "activations_mib"):
            row[f"{key}_ratio"] = row[key] / naive[key]
        layer_mib = naive["activations_mib"] / naive["layers"]
        row["model_mib"] = by_model(job, layer_mib)
    return row


def sent_by_shards(
    count: int, rows: int, width: int, units: int, has_dx: bool = True
) -> float:
    """MiB that a dense layer on several devices sends in a step.

    From device to device, and weights from the host and gradients back.

    Args:
        count: Devices.
        rows: Of a mini-batch.
        width: Units that the layer takes, in float32.
        units: Units that it makes.
        has_dx: Whether what it takes has a gradient.
    """
    # To others x whole and dy in columns; back their columns of y, and dx.
    numbers = rows * width * (count - 1) * (2 if has_dx else 1)
    columns = 2 * rows * units * (1 - 1 / count)
    return float(4 * (numbers + columns + 2 * width * units) / 2**20)
