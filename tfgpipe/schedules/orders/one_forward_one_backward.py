"""The schedule that is named "1f1b": backward as soon as possible.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from tfgpipe.checks import checked_shape
from tfgpipe.schedules.orders.interleaved import interleaved
from tfgpipe.schedules.schedule import Schedule


def one_forward_one_backward(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    link_share: float = 0.0,
) -> Schedule:
    """Goes backward as soon as possible, then forward and backward in turns.

    Takes as long as `gpipe`, and holds fewer micro-batches.

    Args:
        num_devices: K, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 1.
        link_share: See `interleaved`.

    Example:

    >>> tasks = one_forward_one_backward(2, 3).tasks[0]
    >>> [f"{kind[0]}{m}" for kind, _, m in tasks]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']

    Reference: PipeDream-flush,
    [Narayanan et al., 2021](https://arxiv.org/abs/2006.09503), section 3.2
    """
    num_devices, num_micro_batches, num_chunks = checked_shape(
        num_devices, num_micro_batches, num_chunks
    )
    return interleaved(num_devices, num_micro_batches, link_share=link_share)
