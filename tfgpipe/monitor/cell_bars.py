"""Draws how a model is cut: a row a cell, a box a call, as wide as its cost.

Rows begin at the left, so that the longest is the slowest cell; grey is what
the others wait for it. Equal models give equal files, see `picture.py`.

The kinds of calls that cost most have colours of Okabe and Ito, which
colour-blind people tell apart.

Reference: [Okabe and Ito, 2008](https://jfly.uni-koeln.de/color/)
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib import patches
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from tfgpipe.monitor.picture import DIGIT, Frame, edge, ink, mark, note

# Inches, as all sizes of the figure.
_ROW, _INNER, _RIGHT = 0.46, 8.8, 1.5

_LEFT = (0.85, 3.0)  # as the names of the devices need, and at most

_BOTTOM, _LEGEND = 0.68, 0.22  # without a legend; a line of it

_HEIGHT = 0.84  # of a box, in rows

_FONT_SIZES = (5.5, 8.0)  # of the names of calls, in points

_SHARE, _WEIGHTS = 42.0, 100.0  # points from a row to where its numbers end

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")

_OTHER, _WAIT = "#999999", "#F3F3F3"


class Call(NamedTuple):
    """A call of a layer, or a part of one that is in several cells.

    Attributes:
        names: What to call it: the first that fits.
        kind: Name of the layer's class.
        share: Of the cost of all calls.
    """

    names: Sequence[str]
    kind: str
    share: float


class Row(NamedTuple):
    """A cell.

    Attributes:
        devices: Names of those that run it.
        calls: In order.
        weights: The size of its weights, with a unit.
    """

    devices: str
    calls: Sequence[Call]
    weights: str

    @property
    def share(self) -> float:
        """The cell's share of the cost of all calls."""
        return sum(call.share for call in self.calls)


def figure(rows: Sequence[Row], title: str, subtitle: str) -> Figure:
    """The figure of cells, at least one; call i of cell k is `call-k-i`."""
    longest = max(len(row.devices) for row in rows)
    needed = 0.25 + longest * DIGIT * 7.5 / 72
    left = min(max(needed, _LEFT[0]), _LEFT[1])
    colors = _colors(rows)
    columns = _columns(colors)
    num_lines = -(-len(colors) // columns)
    frame = Frame(
        left + _INNER + _RIGHT,
        len(rows) * _ROW,
        left,
        _RIGHT,
        _BOTTOM + num_lines * _LEGEND,
        subtitle,
    )
    picture, axes = frame.figure()
    end = max(row.share for row in rows)
    axes.set_xlim(0, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _draw_rows(axes, rows, end)
    _draw_boxes(axes, rows, colors, scale=72 * _INNER / end)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.4g}%")
    axes.set_xlabel("share of the cost of all calls", fontsize=9)
    frame.write(picture, title)
    if len(rows) > 1:
        mark(axes, 1 / len(rows), "mean", is_behind=True)
    handles = [
        patches.Patch(color=color, label=kind) for kind, color in colors.items()
    ]
    frame.draw_legend(picture, handles, columns)
    return picture


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    """The colours of kinds, those that cost most first, and of all others."""
    costs: Counter[str] = Counter()
    for call in itertools.chain(*(row.calls for row in rows)):
        costs[call.kind] += call.share  # type: ignore[assignment]
    # Equal ones stay as they are called.
    kinds = sorted(costs, key=lambda kind: -costs[kind])
    found = dict(zip(kinds, _COLORS))
    return found if len(found) == len(kinds) else {**found, "others": _OTHER}


def _columns(kinds: Sequence[str] | dict[str, str]) -> int:
    """How many kinds a line of the legend has."""
    widths = [_width(kind, 9.0) + 28 for kind in kinds]
    room = 72 * (_INNER + _RIGHT)
    if sum(widths) <= room:
        return len(widths)
    return max(1, int(room / max(widths)))


def _draw_rows(axes: Axes, rows: Sequence[Row], end: float) -> None:
    """The background of every cell; its device, share and weights."""
    axes.set_yticks([])
    note(axes, -0.62, "cost", _SHARE, "right")
    note(axes, -0.62, "weights", _WEIGHTS, "right")
    for index, row in enumerate(rows):
        axes.add_patch(
            patches.Rectangle(
                (0, index - _HEIGHT / 2),
                end,
                _HEIGHT,
                color=_WAIT,
                zorder=0,
                gid=f"cell-{index}",
            )
        )
        for up, text, size, color in (
            (6, f"cell {index}", 9, "black"),
            (-6, row.devices, 7.5, "#444444"),
        ):
            axes.annotate(
                text,
                (0, index),
                (-6, up),
                ("axes fraction", "data"),
                "offset points",
                ha="right",
                va="center",
                fontsize=size,
                color=color,
            )
        note(axes, index, f"{row.share:.1%}", _SHARE, "right")
        note(axes, index, row.weights, _WEIGHTS, "right")


def _draw_boxes(
    axes: Axes, rows: Sequence[Row], colors: dict[str, str], scale: float
) -> None:
    """The calls, with their names where they fit.

    `scale` is points for the whole cost.
    """
    size = _font_size(rows, scale)
    for index, row in enumerate(rows):
        start = 0.0
        for i, call in enumerate(row.calls):
            color = to_rgb(colors.get(call.kind, _OTHER))
            axes.add_patch(
                patches.Rectangle(
                    (start, index - _HEIGHT / 2),
                    call.share,
                    _HEIGHT,
                    facecolor=color,
                    edgecolor="white",
                    linewidth=edge(call.share * scale),
                    gid=f"call-{index}-{i}",
                )
            )
            room = call.share * scale
            texts = (text for name in call.names for text in _broken(name))
            fitting = next((t for t in texts if _fits(t, size, room)), None)
            if fitting is not None:
                axes.text(
                    start + call.share / 2,
                    index,
                    fitting,
                    ha="center",
                    va="center_baseline" if "\n" not in fitting else "center",
                    linespacing=1.1,
                    fontsize=size,
                    color=ink(color),
                )
            start += call.share


def _font_size(rows: Sequence[Row], scale: float) -> float:
    """At which three quarters of the names fit that do at the smallest."""
    smallest, largest = _FONT_SIZES
    sizes = sorted(_sizes(rows, scale))
    return min(sizes[len(sizes) // 4], largest) if sizes else smallest


def _sizes(rows: Sequence[Row], scale: float) -> Iterator[float]:
    """The largest size at which each name fits, if one is large enough."""
    for call in itertools.chain(*(row.calls for row in rows)):
        room, text = call.share * scale, _broken(call.names[-1])[-1]
        if _fits(text, _FONT_SIZES[0], room):
            yield room / (_width(text, 1.0) + _SPACE)


_SPACE = 0.6  # left and right of a name together, in font sizes


def _fits(text: str, size: float, room: float) -> bool:
    needed = _width(text, size) + _SPACE * size
    return needed <= room * (1 + 1e-6)  # the size may be made for this room


def _broken(name: str) -> list[str]:
    """A name in one line and, if it has an underscore or a slash, in two."""
    ends = [m.end() for m in re.finditer("[_/]+", name) if m.start()]
    lines = [f"{name[:i]}\n{name[i:]}" for i in ends if i < len(name)]
    return [name, *sorted(lines, key=lambda line: _width(line, 1.0))[:1]]


@functools.lru_cache(10_000)
def _width(text: str, size: float) -> float:
    """How wide the widest line of a text is, in points."""
    font = FontProperties(family="DejaVu Sans", size=100)
    widths = [
        text_to_path.get_text_width_height_descent(line, font, ismath=False)[0]
        for line in text.split("\n")
    ]
    return float(max(widths)) * size / 100
