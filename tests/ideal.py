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
from typing import NamedTuple


class Ideal(NamedTuple):
    """What a schedule reaches for cells of equal cost, if nothing is lost."""

    length: float  # as `Schedule.length` gives it
    bubble: float
    held: list[int]  # by device; in a V, they may hold up to two fewer


def _ideal(length: float, work: float, held: list[int]) -> Ideal:
    return Ideal(length, 1 - work / length, held)


def interleaved(
    d: int, m: int, v: int = 1, f: float = 1, b: float = 2
) -> Ideal:
    """With V = 1 that of "gpipe" and "1f1b"; f and b are those of one cell.

    For M < D the length is (V D + M - 1) (f + b). No order is shorter. Device d
    holds min(V M, (V - 1) G + D - d), where G, the largest group of
    micro-batches, is M / max(1, floor(M / D)), rounded up.

    References: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), 2.3;
    [Narayanan et al., 2021](https://arxiv.org/abs/2006.09503), 3.2, and
    [2021](https://arxiv.org/abs/2104.04473), 2.2.
    """
    group = -(-m // max(1, m // d))
    held = [min(v * m, (v - 1) * group + d - i) for i in range(d)]
    length = max(v * m + d - 1, v * d + m - 1) * (f + b)
    return _ideal(length, v * m * (f + b), held)


def breadth_first(
    d: int, m: int, v: int = 1, f: float = 1, b: float = 2
) -> Ideal:
    """As `interleaved`, but all is held; with V = 1 it is "gpipe".

    Reference: [Lamy-Poirier, 2022](https://arxiv.org/abs/2211.05953)
    """
    return interleaved(d, m, v, f, b)._replace(held=[v * m] * d)


def _in_halves(at_most: Callable[[int], int]) -> Callable[..., Ideal]:
    """Of backward passes in halves, by what each of K devices may hold.

    In general the length is the longest of three, with h = b / 2:

    * M (f + b) + (K - 1) f: the last device works without a break;
    * (M + K - 1) (f + h) + h: the first one awaits its last input gradient;
    * M (f + b) + (K - 1) (f + h) + f - min(M, K) f: the first one works
      without a break from its first input gradient on.

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.3,
    which gives the first of these.
    """

    def ideal(k: int, m: int, v: int = 1, f: float = 1, b: float = 2) -> Ideal:
        half, work, held = b / 2, m * (f + b), min(m, at_most(k))
        length = max(
            work + (k - 1) * f,
            (m + k - 1) * (f + half) + half,
            work + (k - 1) * (f + half) + f - held * f,
        )
        return _ideal(length, work, [held] * k)

    return ideal


def _v_shaped(
    waits: Callable[[int], int], held: Callable[[int], int]
) -> Callable[..., Ideal]:
    """With two cells on each device, by D: what one waits, in f, and holds.

    Known for b = 2 f, and M >= D, or 2 D for "dualpipe_v".
    """

    def ideal(d: int, m: int, v: int = 2, f: float = 1, b: float = 2) -> Ideal:
        length = (6 * m + waits(d)) * f
        return _ideal(length, 2 * m * (f + b), [held(d)] * d)

    return ideal


IDEALS: dict[str, Callable[..., Ideal]] = {
    "gpipe": breadth_first,
    "1f1b": interleaved,
    "interleaved": interleaved,
    "breadth_first": breadth_first,
    "zero_bubble": _in_halves(lambda k: k),
    "zero_bubble_2p": _in_halves(lambda k: 2 * k - 1),
    "zero_bubble_v": _v_shaped(lambda d: d - 1, lambda d: 2 * d),
    "v_half": _v_shaped(
        lambda d: 3 * d - 4 if d > 2 else 3 * (d - 1), lambda d: d + 2 - d % 2
    ),
    "v_min": _v_shaped(
        lambda d: max(0, 4 * d - 5) + 2 * (d > 3 and d % 3 == 0),
        lambda d: 2 * ((d + 1) // 3) + 2,
    ),
    "dualpipe_v": _v_shaped(lambda d: d - 1, lambda d: 2 * d + 1),
}
