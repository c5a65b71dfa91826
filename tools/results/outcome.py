"""What a row of the results gives: tables, and a picture of them."""

from collections.abc import Sequence
from typing import NamedTuple

from tools.report import Table


class Series(NamedTuple):
    """Numbers of one kind in a picture.

    Attributes:
        label: What they are.
        x: Where they stand; text for groups that have no scale.
        y: The numbers; `None` for none, where a line is interrupted.
    """

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float | None]


class Picture(NamedTuple):
    """What to draw.

    Attributes:
        title: What is seen.
        x_label: What the horizontal axis is; empty for groups with names.
        y_label: What the vertical axis is.
        lines: Joined by lines, in this order.
        dots: Drawn as single dots, a column a series, with their mean.
        levels: Numbers by label, drawn as horizontal lines.
        is_percent: Whether the numbers are shares.
        is_log: Whether the vertical axis is logarithmic.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Series] = ()
    dots: Sequence[Series] = ()
    levels: dict[str, float] = {}  # noqa: RUF012 (not changed)
    is_percent: bool = False
    is_log: bool = False


class Outcome(NamedTuple):
    """What a row gives.

    Attributes:
        tables: To be printed.
        picture: To be drawn.
    """

    tables: list[Table]
    picture: Picture
