"""Draws the pictures of the results.

Colours are those of Okabe and Ito, which colour-blind people tell apart, and
every series has a marker and a kind of line of its own, too. Nothing is taken
from the machine, neither a display nor fonts nor settings of the user, so that
equal numbers give equal files.

Reference: [Okabe and Ito, 2008](https://jfly.uni-koeln.de/color/)
"""

import itertools
import pathlib
from collections.abc import Sequence

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from tfgpipe.files import put_in_place
from tools.results.outcome import Picture, Series

_SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
}
_SIZE = (8.0, 4.8)  # inches
# Colour, marker, kind of line.
_STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#E69F00", "D", ":"),
    ("#CC79A7", "v", "-"),
    ("#56B4E9", "P", "--"),
    ("#000000", "X", "-."),
)


def save(picture: Picture, suffix: str, path: pathlib.Path) -> None:
    """Draws into a file."""
    with matplotlib.style.context(["default", _SETTINGS]):
        made = figure(picture, suffix)
        # A version would make equal pictures differ.
        with put_in_place(path) as beside:
            made.savefig(beside, dpi=160, metadata={"Software": None})


def figure(picture: Picture, suffix: str = "") -> Figure:
    """Draws."""
    made = Figure(_SIZE, layout="constrained")
    FigureCanvasAgg(made)
    axes = made.add_subplot()
    axes.set_title(picture.title + suffix, fontsize=12, loc="left")
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.y_label)
    if picture.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_locator(NullLocator())
    if picture.is_percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    styles = itertools.cycle(_STYLES)
    for series in picture.lines:
        color, marker, style = next(styles)
        axes.plot(
            series.x,
            series.y,
            color=color,
            marker=marker,
            linestyle=style,
            label=series.label,
        )
    _draw_dots(axes, picture.dots, ".1%" if picture.is_percent else ".1f")
    for label, value in picture.levels.items():
        color, _, style = next(styles)
        axes.axhline(value, color=color, linestyle=style, label=label)
    if axes.get_legend_handles_labels()[1]:
        made.legend(loc="outside lower center", ncols=2, frameon=False)
    return made


def _draw_dots(axes: Axes, columns: Sequence[Series], style: str) -> None:
    """A column of dots for each series, side by side, with its mean."""
    for place, series in enumerate(columns):
        color, marker, _ = _STYLES[place % len(_STYLES)]
        # A little apart, so that equal ones are seen.
        shifts = [
            0.04 * (i - (len(series.y) - 1) / 2) for i in range(len(series.y))
        ]
        axes.plot(
            [place + shift for shift in shifts],
            series.y,
            color=color,
            marker=marker,
            linestyle="",
        )
        mean = sum(series.y) / len(series.y)
        axes.hlines(mean, place - 0.3, place + 0.3, color=color)
        axes.annotate(
            f"mean {mean:{style}}",
            (place + 0.3, mean),
            (4, 0),
            textcoords="offset points",
            va="center",
        )
    if columns:
        axes.set_xticks(range(len(columns)), [s.label for s in columns])
        axes.set_xlim(-0.6, len(columns) - 0.4)
        axes.grid(False, axis="x")
