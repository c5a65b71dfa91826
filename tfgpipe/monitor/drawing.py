"""Draws rows of boxes: the tasks of devices, the calls of cells.

Nothing is taken from the machine, neither a display nor fonts nor settings of
the user, so that equal contents give equal files.

Colours are of Okabe and Ito: colour-blind people tell them apart.

Reference: [Okabe and Ito, 2008](https://jfly.uni-koeln.de/color/)
"""

import math
import pathlib
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib import patches
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure

from tfgpipe import timeline
from tfgpipe.files import put_in_place
from tfgpipe.run import Event

_WIDTH, _MARGINS = 8.8, 3.0  # inches: the rows, and beside
_ROW, _LINE = 0.44, 0.2  # inches: heights of a row, and of a line of text
_FONT_SIZE = 7.0
_DIGIT = 0.64  # width of a digit in font sizes; most letters have less
_LEGEND_COLUMNS = 5
_SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "svg.fonttype": "path",
    "svg.hashsalt": "tfgpipe",  # or identifiers are random
    "text.parse_math": False,  # names are written as they are
}

# Of a kind of task: in the first cell of a device, and in its last. They also
# differ as greys.
TASK_COLORS = {
    "forward": ("#00558A", "#4A96CB"),
    "recompute": ("#56B4E9", "#9AD3F3"),
    "backward": ("#E69F00", "#F5CE78"),
    "input_gradient": ("#D55E00", "#E88F4E"),
    "weight_gradient": ("#F0E442", "#F7F09A"),
    "head": ("#009E73", "#6FCBAE"),
    "update": ("#000000", "#000000"),
}
_KIND_COLORS = "#0072B2 #E69F00 #009E73 #D55E00 #56B4E9 #CC79A7".split()
_OTHER_KINDS, _IDLE = "#999999", "#F3F3F3"
_MOST_NAMES = 2  # of the devices of a cell


class Box(NamedTuple):
    """A box in a row.

    Attributes:
        start: Where it begins, in the unit of the axis.
        width: In the same unit.
        color: What it is filled with.
        label: What is written in it if there is room.
    """

    start: float
    width: float
    color: str
    label: str = ""


class Row(NamedTuple):
    """A row of boxes.

    Attributes:
        label: What is written left of it.
        boxes: From left to right.
        note: What is written right of it.
    """

    label: str
    boxes: list[Box]
    note: str


class Picture(NamedTuple):
    """Rows of boxes on one axis.

    Attributes:
        rows: From top to bottom.
        filled: Where the background of the rows ends.
        length: Where the axis ends.
        title: What is shown.
        subtitle: What follows from it, in as many lines as it needs.
        legend: The meanings of colours.
        axis: What the axis shows.
        factor: Of the unit of the boxes, what the numbers of the axis count.
        mean: A place on the axis to mark, or None.
    """

    rows: Sequence[Row]
    filled: float
    length: float
    title: str
    subtitle: str
    legend: Mapping[str, str]
    axis: str
    factor: float
    mean: float | None = None

    def save(self, path: pathlib.Path) -> None:
        """Draws it into a file, which ends with ".png" or ".svg"."""
        kind = path.suffix.removeprefix(".")
        # A date would make equal pictures differ.
        metadata = {"Date": None} if kind == "svg" else None
        with (
            matplotlib.style.context(["default", _SETTINGS]),
            put_in_place(path) as beside,
        ):
            self.figure().savefig(
                beside, format=kind, dpi=160, metadata=metadata
            )

    def figure(self) -> Figure:
        """Returns the figure."""
        lines = textwrap.wrap(self.subtitle, int(12 * _WIDTH))
        legend_lines = math.ceil(len(self.legend) / _LEGEND_COLUMNS)
        height = 1.0 + _ROW * len(self.rows)
        height += _LINE * (len(lines) + legend_lines)
        figure = Figure((_WIDTH + _MARGINS, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title("\n".join([self.title, *lines]), loc="left", fontsize=10)
        axes.set_xlim(0, self.length)
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_yticks(range(len(self.rows)), [r.label for r in self.rows])
        axes.tick_params(labelsize=8)
        axes.tick_params("y", length=0)
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x * self.factor:,.6g}")
        axes.set_xlabel(self.axis, fontsize=9)
        if self.mean is not None:
            axes.axvline(self.mean, c="black", lw=1, ls="--", clip_on=False)
            axes.text(self.mean, -0.5, "mean", ha="right", va="bottom", size=8)
        for index, row in enumerate(self.rows):
            self._draw_row(axes, index, row)
        colors = [
            patches.Patch(color=color, label=text)
            for text, color in self.legend.items()
        ]
        figure.legend(
            handles=colors,
            loc="outside lower left",
            ncols=_LEGEND_COLUMNS,
            frameon=False,
            fontsize=9,
        )
        return figure

    def _draw_row(self, axes: Axes, index: int, row: Row) -> None:
        for start, width, color, label in (
            Box(0, self.filled, _IDLE),
            *row.boxes,
        ):
            points = 72 * _WIDTH * width / self.length
            axes.barh(
                index,
                width,
                0.84,
                start,
                color=color,
                edgecolor="white",
                linewidth=min(0.6, points / 8),
            )
            if len(label) * _DIGIT * _FONT_SIZE <= 0.9 * points:
                axes.text(
                    start + width / 2,
                    index,
                    label,
                    ha="center",
                    va="center_baseline",
                    fontsize=_FONT_SIZE,
                    color=_ink(color),
                )
        axes.text(self.length, index, f"  {row.note}", va="center", fontsize=8)


def _ink(color: str) -> str:
    """Returns black or white, whichever is easier to read on the colour."""
    red, green, blue = (part**2.2 for part in to_rgb(color))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if luminance > 0.18 else "white"


# ------------------------------------------------------------ what is drawn
def timeline_picture(
    events: Sequence[Event], title: str, subtitle: str = "", end: float = 0.0
) -> Picture:
    """Shows when each device ran which task.

    The axis goes to `end` at least, so that pictures of different lengths can
    be compared.
    """
    total = max(event.end for event in events)
    places = timeline.places(events)
    last = max(places.values()) or 1
    shades = {
        kind: LinearSegmentedColormap.from_list(kind, colors)
        for kind, colors in TASK_COLORS.items()
    }
    rows = [
        Row(f"device {device}", [], f"{share:.1%} idle")
        for device, share in enumerate(timeline.idle_shares(events))
    ]
    for task, device, start, end_of_task in events:
        color = to_hex(shades[task.kind](places.get(task.cell, 0) / last))
        label = "" if task.kind == "update" else str(task.micro_batch)
        box = Box(start, end_of_task - start, color, label)
        rows[device].boxes.append(box)
    kinds = {event.task.kind for event in events}
    legend: dict[str, str] = {
        kind.replace("_", " "): color
        for kind, (color, _) in TASK_COLORS.items()
        if kind in kinds
    }
    is_shaded = max(places.values()) > 0
    lighter = "; the first cells of a device are the darkest" * is_shaded
    return Picture(
        rows,
        total,
        max(total, end),
        title,
        subtitle,
        legend | {"idle": _IDLE},
        f"time (ms){lighter}",
        1000,
    )


def cells_picture(model: Any) -> Picture:
    """Shows how a `GPipe` is cut: boxes of calls, as wide as their costs."""
    built, cells = model.built_for("plot_cells(model)"), model.cells()
    total = sum(cell.cost for cell in cells)
    steps = [step for cell in built.cells for step in cell.steps]
    # Those that cost nothing are all as wide.
    shares = [c / total if total else 1 / len(steps) for c in built.costs]
    costs: Counter[str] = Counter()
    for step, share in zip(steps, shares):
        costs[_kind(step)] += share  # type: ignore[assignment]
    kinds = [kind for kind, _ in costs.most_common()]
    legend = dict(zip(kinds, _KIND_COLORS))
    calls, rows = zip(steps, shares), []
    for cell in cells:
        boxes, start = [], 0.0
        for step, share in islice(calls, len(cell.layers)):
            color = legend.get(_kind(step), _OTHER_KINDS)
            boxes.append(Box(start, share, color, step.layer.name))
            start += share
        devices = ", ".join(map(_short, cell.devices[:_MOST_NAMES]))
        if len(cell.devices) > _MOST_NAMES:
            devices += f" and {len(cell.devices) - _MOST_NAMES} more"
        label = f"cell {cell.index}\n{devices}"
        rows.append(
            Row(label, boxes, f"{start:.1%}, {_mib(cell.weight_bytes)}")
        )
    if len(legend) < len(kinds):
        legend["others"] = _OTHER_KINDS
    cost = f"{total:.3g} {cells[0].unit}".rstrip()
    subtitle = (
        f"{len(steps):,} calls, which cost {cost}; "
        f"{_mib(sum(cell.weight_bytes for cell in cells))} of weights"
    )
    longest = max(sum(box.width for box in row.boxes) for row in rows)
    return Picture(
        rows,
        longest,
        longest,
        f"{model.name}: K = {len(cells)}",
        subtitle,
        legend,
        "share of the cost of all calls (%)",
        100,
        1 / len(rows) if len(rows) > 1 else None,
    )


def _short(device: str) -> str:
    """Returns the name of a device, without this host."""
    name = device.removeprefix("/job:localhost/replica:0/task:0")
    return name.removeprefix("/device:")


def _kind(step: Any) -> str:
    """Returns the class of what is called; legends leave out a leading _."""
    called = step.section.operation
    return "no call" if called is None else type(called).__name__.lstrip("_")


def _mib(num_bytes: int) -> str:
    """Returns a size as a text.

    Example:

    >>> _mib(0), _mib(300_000), _mib(300_000_000)
    ('0 MiB', '0.286 MiB', '286 MiB')
    """
    return f"{num_bytes / 2**20:.3g} MiB"
