"""Chooses regions: what a model repeats, a block or some in a row.

    steps      embed | block block block block block block | norm head
    regions          | region      | region      | region  |

Where XLA compiles, each region becomes a function of its own, and equal ones
share it: one is traced, cut and compiled for all. If cells begin at regions,
functions and bits do not depend on the number of cells.

A region that computes little waits for its call, and one of many blocks takes
long to compile. So a region has the fewest blocks that make a call worth its
time, as long as several regions are left. Where micro-batches are computed
again, the input of each region is held for each of them, and all results of one
region for one of them: then a region has more blocks if there are many
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras import tree

from tfgpipe.devices import names
from tfgpipe.graphs import LIKELY_ROWS, Repeat
from tfgpipe.internals import Nest

# A smaller function would be a large share of its own call.
_LEAST_OPERATIONS = 24
# FLOPs of a region's forward pass, for a micro-batch: a call takes 0.2 ms on a
# CPU, and about as long on an accelerator, which computes 1000 times as much.
_LEAST_FLOPS = 2**23
_LEAST_FLOPS_ON_ACCELERATORS = 2**33
# Of sizes that inputs do not have, besides rows.
_LIKELY_SIZE = 128
# As many regions are left of a run, however little they compute.
_FEWEST = 4
# More bytes than needed that smaller regions may hold.
_SLACK = 1.25


def region_bounds(
    source: Any,
    input_spec: Nest,
    num_micro_batches: int,
    recomputes: bool,
    devices: Sequence[str],
) -> list[int]:
    """Returns the steps at which regions begin or end, in order.

    They are the same for every number of cells.

    Args:
        source: The model, whose steps are known.
        input_spec: Nest of `keras.KerasTensor`s that it takes.
        num_micro_batches: M.
        recomputes: Whether a cell computes micro-batches again.
        devices: Names of the devices that compute.
    """
    m = num_micro_batches
    specs = [spec for spec in tree.flatten(input_spec) if spec is not None]
    is_open = any(None in spec.shape[1:] for spec in specs)
    likely = LIKELY_ROWS / m * (_LIKELY_SIZE if is_open else 1)
    least = _LEAST_FLOPS
    if names.device_types(devices) != ["CPU"]:
        least = _LEAST_FLOPS_ON_ACCELERATORS
    bounds: set[int] = set()
    for repeat in source.repeats:
        block = slice(repeat.start, repeat.start + repeat.size)
        inputs = m * source.live_bytes[repeat.start]
        held = inputs, sum(source.made_bytes[block])
        several = blocks_of_region(
            repeat,
            least / max(likely * sum(source.flops[block]), 1),
            held if recomputes else None,
        )
        if several is not None:
            bounds.update(repeat.bounds(several))
    return sorted(bounds)


def blocks_of_region(
    repeat: Repeat, enough: float, held: tuple[int, int] | None
) -> int | None:
    """Returns how many blocks in a row are a region; None for no regions.

    Args:
        repeat: The blocks.
        enough: How many of them compute long enough for a call.
        held: Bytes of a region's inputs, of all micro-batches, and of a block's
            results; None if nothing is computed again.

    Example:

    >>> run = Repeat(start=1, size=6, num_blocks=12, num_operations=100)
    >>> blocks_of_region(run, 0.5, None), blocks_of_region(run, 99.0, None)
    (1, 3)
    """
    least = math.ceil(_LEAST_OPERATIONS / repeat.num_operations)
    most = max(least, repeat.num_blocks // _FEWEST)
    if (
        repeat.num_blocks < 2 * least
        or enough > most > repeat.num_blocks // _FEWEST
    ):
        return None
    sizes = range(min(max(least, math.ceil(enough)), most), most + 1)
    if held is None:
        return sizes[0]
    inputs, results = held
    needed = [inputs * repeat.num_blocks / n + results * n for n in sizes]
    return next(
        n for n, size in zip(sizes, needed) if size <= _SLACK * min(needed)
    )
