"""How long the known schedules take, and what they hold, in closed form.

Cells cost the same here: f for a forward task and b for a backward one, of
which an input and a weight gradient take half each. K cells are on as many
devices or, under "interleaved", V cells on each of D devices; M micro-batches.

| schedule | length | most held by device d |
| --- | --- | --- |
| gpipe | (M + K - 1) (f + b) | M |
| 1f1b | the same | min(M, K - d) |
| interleaved | (V M + D - 1) (f + b) if M >= D | about V D - d |
| breadth_first | the same | V M |
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
from typing import Any, NamedTuple

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


IDEALS: dict[str, Callable[..., Ideal]] = {}


def _ideal_of(name: str, chunks: int | None = 1) -> Callable[..., Any]:
    """Puts the closed form of a schedule into `IDEALS`, with checked counts.

    Args:
        name: Of the schedule.
        chunks: What V must be; None for any.
    """

    def put(formula: Callable[..., Ideal]) -> Callable[..., Ideal]:
        def ideal(
            num_devices: int,
            num_micro_batches: int,
            num_chunks: int = chunks or 1,
            forward: float = 1,
            backward: float = 2,
        ) -> Ideal:
            counts = num_devices, num_micro_batches, num_chunks
            return formula(*checked_shape(*counts, chunks), forward, backward)

        IDEALS[name] = ideal
        return ideal

    return put


@_ideal_of("gpipe")
def gpipe_ideal(k: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `gpipe`.

    Length (M + K - 1) (f + b), bubble (K - 1) / (M + K - 1), M held.

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), 2.3
    """
    return interleaved_ideal(k, m, 1, f, b)._replace(held=[m] * k)


@_ideal_of("1f1b")
def one_forward_one_backward_ideal(
    k: int, m: int, v: int, f: float, b: float
) -> Ideal:
    """Of `one_forward_one_backward`.

    Length and bubble as of `gpipe`; device k holds min(M, K - k).

    Reference: [Narayanan et al., 2021](https://arxiv.org/abs/2006.09503), 3.2
    """
    return interleaved_ideal(k, m, 1, f, b)


@_ideal_of("interleaved", None)
def interleaved_ideal(d: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `interleaved`, with f and b those of one cell.

    For M >= D, length (V M + D - 1) (f + b) and bubble
    (D - 1) / (V M + D - 1); for M < D, length (V D + M - 1) (f + b). No order
    is shorter. Device d holds min(V M, (V - 1) G + D - d), where G, the largest
    group of micro-batches, is M / max(1, floor(M / D)), rounded up.

    Reference: [Narayanan et al., 2021](https://arxiv.org/abs/2104.04473), 2.2
    """
    group = -(-m // max(1, m // d))
    return _ideal(
        max(v * m + d - 1, v * d + m - 1) * (f + b),
        v * m * (f + b),
        [min(v * m, (v - 1) * group + d - i) for i in range(d)],
    )


@_ideal_of("breadth_first", None)
def breadth_first_ideal(d: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `breadth_first`: as `interleaved`, but all is held.

    Reference: [Lamy-Poirier, 2022](https://arxiv.org/abs/2211.05953)
    """
    return interleaved_ideal(d, m, v, f, b)._replace(held=[v * m] * d)


@_ideal_of("zero_bubble")
def zero_bubble_ideal(k: int, m: int, v: int, f: float, b: float) -> Ideal:
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
    return _in_halves(k, m, f, b, min(m, k))


@_ideal_of("zero_bubble_2p")
def zero_bubble_2p_ideal(k: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `zero_bubble_2p`.

    As of `zero_bubble`, with min(M, 2 K - 1) in place of min(M, K), which is
    what every device holds.

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.3
    """
    return _in_halves(k, m, f, b, min(m, 2 * k - 1))


def _in_halves(k: int, m: int, f: float, b: float, held: int) -> Ideal:
    half, work = b / 2, m * (f + b)
    length = max(
        work + (k - 1) * f,
        (m + k - 1) * (f + half) + half,
        work + (k - 1) * (f + half) + f - held * f,
    )
    return _ideal(length, work, [held] * k)


@_ideal_of("zero_bubble_v", 2)
def zero_bubble_v_ideal(d: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `zero_bubble_v`, with f of one cell: length (6 M + D - 1) f.

    The last device begins when D - 1 others have, and works without a break:
    no order is shorter. Known for b = 2 f and M >= D.
    """
    return _v_shaped(m, f, b, d, d - 1, [2 * d] * d)


@_ideal_of("v_half", 2)
def v_half_ideal(d: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `v_half`: see `zero_bubble_v_ideal`, with 3 D - 4 from D = 3 on."""
    waits = 3 * d - 4 if d > 2 else 3 * (d - 1)
    return _v_shaped(m, f, b, d, waits, [d + 2 - d % 2] * d)


@_ideal_of("v_min", 2)
def v_min_ideal(d: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `v_min`: see `zero_bubble_v_ideal`, with 4 D - 5 from D = 2 on.

    It is two more from D = 6 on where D is divisible by 3.
    """
    waits = max(0, 4 * d - 5) + 2 * (d > 3 and d % 3 == 0)
    held = [2 * ((d + 1) // 3) + 2] * d
    return _v_shaped(m, f, b, d, waits, held)


@_ideal_of("dualpipe_v", 2)
def dualpipe_v_ideal(d: int, m: int, v: int, f: float, b: float) -> Ideal:
    """Of `dualpipe_v`: see `zero_bubble_v_ideal`; known for M >= 2 D."""
    return _v_shaped(m, f, b, 2 * d, d - 1, [2 * d + 1] * d)


def _v_shaped(
    m: int, f: float, b: float, fewest: int, waits: int, held: list[int]
) -> Ideal:
    """With two cells on each device.

    Args:
        m: M.
        f: Of a forward task.
        b: Of a backward one.
        fewest: M from which on it is known.
        waits: Of a device, in forward tasks.
        held: By each device.
    """
    if m < fewest or b != 2 * f:
        raise ValueError(
            "The closed form is known for `num_micro_batches` of at least "
            f"{fewest}, and `backward` twice `forward`. Received: {m}, "
            f"{b} and {f}. Simulate others: `Schedule.length`."
        )
    return _ideal((6 * m + waits) * f, 2 * m * (f + b), held)
