"""The schedule that is named "gpipe": all forward, then all backward.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from tfgpipe.checks import checked_shape
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import Task


def gpipe(
    num_devices: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """Fill-drain: all forward, then all backward, last micro-batch first.

    Args:
        num_devices: K, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 1.

    Example:

    >>> [f"{kind[0]}{m}" for kind, _, m in gpipe(2, 3).tasks[0]]
    ['f0', 'f1', 'f2', 'b2', 'b1', 'b0']

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), figure 2c
    """
    num_devices, num_micro_batches, num_chunks = checked_shape(
        num_devices, num_micro_batches, num_chunks
    )
    micro_batches = range(num_micro_batches)
    return Schedule(
        [Task("forward", k, m) for m in micro_batches]
        + [Task("backward", k, m) for m in reversed(micro_batches)]
        for k in range(num_devices)
    )
