"""How long the known schedules take, and what they hold, in closed form.

Cells cost the same here: f for a forward task and b for a backward one, of
which an input and a weight gradient take half each. K cells are on as many
devices or, under "interleaved", V cells on each of D devices; M micro-batches.

| schedule | length | most held by device d |
| --- | --- | --- |
| gpipe | (M + K - 1) (f + b) | M |
| 1f1b | the same | min(M, K - d) |
| interleaved | (V M + D - 1) (f + b) if M >= D | about V D - d |
| zero_bubble | 3 M + K - 1 if M >= K, at f = 1, b = 2 | min(M, K) |

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfgpipe.checks import checked_counts


class Ideal(NamedTuple):
    """What a schedule reaches for cells of equal cost, if nothing is lost.

    Attributes:
        length: Time of all tasks together, as `Schedule.length` gives it.
        bubble: Share of it in which the devices idle, as `Schedule.bubble`.
        held: By device, the most micro-batches that it holds, once a cell, as
            `Schedule.held`.
    """

    length: float
    bubble: float
    held: list[int]


def _ideal(length: float, work: float, held: list[int]) -> Ideal:
    return Ideal(length, 1 - work / length, held)


def checked_shape(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int,
    interleaves: bool = False,
) -> list[int]:
    """The counts D, M and V; a schedule that does not interleave has V = 1."""
    found = checked_counts(
        num_devices=num_devices,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
    )
    if num_chunks > 1 and not interleaves:
        raise ValueError(
            "`num_chunks` must be 1 under this schedule: one cell on every "
            f"device. Received: num_chunks={num_chunks}. Use 'interleaved' "
            "for several cells a device."
        )
    return found


def gpipe_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `gpipe`.

    Length (M + K - 1) (f + b), bubble (K - 1) / (M + K - 1), M held.

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), 2.3
    """
    k, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks)
    ideal = interleaved_ideal(k, m, 1, forward, backward)
    return ideal._replace(held=[m] * k)


def one_forward_one_backward_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `one_forward_one_backward`.

    Length and bubble as of `gpipe`; device k holds min(M, K - k).

    Reference: [Narayanan et al., 2021](https://arxiv.org/abs/2006.09503), 3.2
    """
    checked_shape(num_devices, num_micro_batches, num_chunks)
    return interleaved_ideal(
        num_devices, num_micro_batches, 1, forward, backward
    )


def interleaved_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `interleaved`, with f and b those of one cell.

    For M >= D, length (V M + D - 1) (f + b) and bubble
    (D - 1) / (V M + D - 1); for M < D, length (V D + M - 1) (f + b). No order
    is shorter. Device d holds min(V M, (V - 1) G + D - d), where G, the largest
    group of micro-batches, is M / max(1, floor(M / D)), rounded up.

    Reference: [Narayanan et al., 2021](https://arxiv.org/abs/2104.04473), 2.2
    """
    d, m, v = checked_shape(num_devices, num_micro_batches, num_chunks, True)
    group = -(-m // max(1, m // d))
    return _ideal(
        max(v * m + d - 1, v * d + m - 1) * (forward + backward),
        v * m * (forward + backward),
        [min(v * m, (v - 1) * group + d - i) for i in range(d)],
    )


def zero_bubble_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `zero_bubble`.

    With f = 1 and b = 2, length max(3 M + K - 1, 2 M + 2 K - 1): the former
    from M = K on. In general it is the longest of three, with h = b / 2:

    * M (f + b) + (K - 1) f: the last device works without a break;
    * (M + K - 1) (f + h) + h: the first one awaits its last input gradient;
    * M (f + b) + (K - 1) (f + h) + f - min(M, K) f: the first one works
      without a break from its first input gradient on.

    Every device holds min(M, K).

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.3,
    which gives the first of these.
    """
    k, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks)
    f, half = forward, backward / 2
    work = m * (f + backward)
    length = max(
        work + (k - 1) * f,
        (m + k - 1) * (f + half) + half,
        work + (k - 1) * (f + half) + f - min(m, k) * f,
    )
    return _ideal(length, work, [min(m, k)] * k)


IDEALS: dict[str, Callable[..., Ideal]] = {
    "gpipe": gpipe_ideal,
    "1f1b": one_forward_one_backward_ideal,
    "interleaved": interleaved_ideal,
    "zero_bubble": zero_bubble_ideal,
}
