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
| zero_bubble_2p | the same | min(M, 2 K - 1) |

With two cells on each of D devices, in a V, at f = 1 and b = 2; the first cell
has all of b in its weight gradient, as nothing takes that of the inputs:

| schedule | length | held by a device |
| --- | --- | --- |
| zero_bubble_v | 6 M + D - 1 if M >= D | 2 D |
| v_half | 6 M + 3 D - 4 if M >= D > 2 | D + 1, or D + 2 if D is even |
| v_min | 6 M + 4 D - 5, 2 more if D > 3 is divisible by 3 | 2 D / 3 and 2 |
| dualpipe_v | 6 M + D - 1 if M >= 2 D | 2 D + 1 |
| "1f1b" of whole cells | 6 M + 6 D - 6 | 2 D |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfgpipe.checks import checked_shape


class Ideal(NamedTuple):
    """What a schedule reaches for cells of equal cost, if nothing is lost.

    Attributes:
        length: Time of all tasks together, as `Schedule.length` gives it.
        bubble: Share of it in which the devices idle, as `Schedule.bubble`.
        held: By device, the most micro-batches that it holds, once a cell, as
            `Schedule.held`. In a V, devices may hold up to two fewer.
    """

    length: float
    bubble: float
    held: list[int]


def _ideal(length: float, work: float, held: list[int]) -> Ideal:
    return Ideal(length, 1 - work / length, held)


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
    d, m, v = checked_shape(num_devices, num_micro_batches, num_chunks, None)
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
    return _in_halves(k, m, forward, backward, min(m, k))


def zero_bubble_2p_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `zero_bubble_2p`.

    As of `zero_bubble`, with min(M, 2 K - 1) in place of min(M, K), which is
    what every device holds.

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.3
    """
    k, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks)
    return _in_halves(k, m, forward, backward, min(m, 2 * k - 1))


def _in_halves(
    k: int, m: int, forward: float, backward: float, held: int
) -> Ideal:
    f, half = forward, backward / 2
    work = m * (f + backward)
    length = max(
        work + (k - 1) * f,
        (m + k - 1) * (f + half) + half,
        work + (k - 1) * (f + half) + f - held * f,
    )
    return _ideal(length, work, [held] * k)


def zero_bubble_v_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 2,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `zero_bubble_v`, with f of one cell: length (6 M + D - 1) f.

    The last device begins when D - 1 others have, and works without a break:
    no order is shorter. Known for b = 2 f and M >= D.
    """
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    return _v_shaped(m, forward, backward, d, d - 1, [2 * d] * d)


def v_half_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 2,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `v_half`: see `zero_bubble_v_ideal`, with 3 D - 4 from D = 3 on."""
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    waits = 3 * d - 4 if d > 2 else 3 * (d - 1)
    return _v_shaped(m, forward, backward, d, waits, [d + 2 - d % 2] * d)


def v_min_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 2,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `v_min`: see `zero_bubble_v_ideal`, with 4 D - 5 from D = 2 on.

    It is two more from D = 6 on where D is divisible by 3.
    """
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    waits = max(0, 4 * d - 5) + 2 * (d > 3 and d % 3 == 0)
    held = [2 * ((d + 1) // 3) + 2] * d
    return _v_shaped(m, forward, backward, d, waits, held)


def dualpipe_v_ideal(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 2,
    forward: float = 1,
    backward: float = 2,
) -> Ideal:
    """Of `dualpipe_v`: see `zero_bubble_v_ideal`; known for M >= 2 D."""
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    return _v_shaped(m, forward, backward, 2 * d, d - 1, [2 * d + 1] * d)


def _v_shaped(
    m: int,
    forward: float,
    backward: float,
    fewest: int,
    waits: int,
    held: list[int],
) -> Ideal:
    """With two cells on each device.

    Args:
        m: M.
        forward: f.
        backward: b.
        fewest: M from which on it is known.
        waits: Of a device, in forward tasks.
        held: By each device.
    """
    if m < fewest or backward != 2 * forward:
        raise ValueError(
            "The closed form is known for `num_micro_batches` of at least "
            f"{fewest}, and `backward` twice `forward`. Received: {m}, "
            f"{backward} and {forward}. Simulate others: `Schedule.length`."
        )
    return _ideal((6 * m + waits) * forward, 2 * m * (forward + backward), held)


IDEALS: dict[str, Callable[..., Ideal]] = {
    "gpipe": gpipe_ideal,
    "1f1b": one_forward_one_backward_ideal,
    "interleaved": interleaved_ideal,
    "zero_bubble": zero_bubble_ideal,
    "zero_bubble_2p": zero_bubble_2p_ideal,
    "zero_bubble_v": zero_bubble_v_ideal,
    "v_half": v_half_ideal,
    "v_min": v_min_ideal,
    "dualpipe_v": dualpipe_v_ideal,
}
