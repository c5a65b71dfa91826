"""Draws rows of boxes: the tasks of devices, the calls of cells.

Nothing is taken from the machine, neither a display nor fonts nor settings of
the user, so that equal contents give equal files.

Colours are of Okabe and Ito: colour-blind people tell them apart.

Reference: [Okabe and Ito, 2008](https://jfly.uni-koeln.de/color/)
"""

import math
import pathlib
import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import matplotlib.style
import tensorflow as tf
from matplotlib import patches
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure

from tfgpipe import timeline
from tfgpipe.files import put_in_place
from tfgpipe.run import Event

_ROW, _LINE, _MARGINS = 0.44, 0.2, 3.0  # inches: a row, a line of text, beside
_HEIGHT = 0.84  # of a box, in rows
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
_KIND_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
)
_OTHER_KINDS, _IDLE = "#999999", "#F3F3F3"
_MOST_NAMES = 2  # of the devices of a cell


class Box(NamedTuple):
    """A box in a row.

    Attributes:
        start: Where it begins, in the unit of the axis.
        width: In the same unit.
        color: What it is filled with.
        labels: What may be written in it: the first that fits.
        name: Identifies it in an SVG file.
        height: In rows.
    """

    start: float
    width: float
    color: str
    labels: Sequence[str]
    name: str
    height: float = _HEIGHT


class Row(NamedTuple):
    """A row of boxes.

    Attributes:
        label: What is written left of it.
        boxes: From left to right.
        note: What is written right of it.
    """

    label: str
    boxes: Sequence[Box]
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
        mark: A place on the axis and its name, or None.
        width: Inches of the rows.
    """

    rows: Sequence[Row]
    filled: float
    length: float
    title: str
    subtitle: str
    legend: Mapping[str, str]
    axis: str
    factor: float
    mark: tuple[float, str] | None
    width: float = 8.8

    def save(self, *paths: pathlib.Path) -> None:
        """Draws it into files, which end with ".png" or ".svg"."""
        with matplotlib.style.context(["default", _SETTINGS]):
            figure = self.figure()
            for path in paths:
                kind = path.suffix.removeprefix(".")
                # A date would make equal pictures differ.
                metadata = {"Date": None} if kind == "svg" else None
                with put_in_place(path) as beside:
                    figure.savefig(
                        beside, format=kind, dpi=160, metadata=metadata
                    )

    def figure(self) -> Figure:
        """Returns the figure."""
        lines = textwrap.wrap(self.subtitle, int(12 * self.width))
        legend_lines = math.ceil(len(self.legend) / _LEGEND_COLUMNS)
        height = 1.0 + _ROW * len(self.rows)
        height += _LINE * (len(lines) + legend_lines)
        figure = Figure((self.width + _MARGINS, height), layout="constrained")
        FigureCanvasAgg(figure)
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
        if self.mark is not None:
            place, name = self.mark
            axes.axvline(place, color="black", lw=1, ls="--", clip_on=False)
            axes.text(place, -0.5, name, ha="right", va="bottom", fontsize=8)
        for index, row in enumerate(self.rows):
            self._draw_row(axes, index, row)
        figure.legend(
            handles=[
                patches.Patch(color=color, label=text)
                for text, color in self.legend.items()
            ],
            loc="outside lower left",
            ncols=_LEGEND_COLUMNS,
            frameon=False,
            fontsize=9,
        )
        return figure

    def _draw_row(self, axes: Axes, index: int, row: Row) -> None:
        background = Box(0, self.filled, _IDLE, (), f"row-{index}")
        for box in (background, *row.boxes):
            points = 72 * self.width * box.width / self.length
            axes.barh(
                index,
                box.width,
                box.height,
                box.start,
                color=box.color,
                edgecolor="white",
                linewidth=min(0.6, points / 8),
                gid=box.name,
            )
            room = 0.9 * points / (_DIGIT * _FONT_SIZE)
            middle = box.start + box.width / 2
            for text in [t for t in box.labels if len(t) <= room][:1]:
                axes.text(
                    middle,
                    index,
                    text,
                    ha="center",
                    va="center_baseline",
                    fontsize=_FONT_SIZE,
                    color=_ink(box.color),
                )
        note = f"  {row.note}"
        axes.text(self.length, index, note, va="center", fontsize=8)


def _ink(color: str) -> str:
    """Returns black or white, whichever is easier to read on the colour."""
    red, green, blue = (part**2.2 for part in to_rgb(color))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if luminance > 0.18 else "white"


# ------------------------------------------------------------ what is drawn
def timeline_picture(
    events: Sequence[Event],
    title: str,
    subtitle: str = "",
    ideal: float | None = None,
    end: float = 0.0,
) -> Picture:
    """Shows when each device ran which task.

    There is a mark at `ideal` seconds. The axis goes to `end` at least, so that
    pictures of different lengths can be compared.
    """
    total = max(event.end for event in events)
    places = timeline.places(events)
    last = max(places.values()) or 1
    shades = {
        kind: LinearSegmentedColormap.from_list(kind, colors)
        for kind, colors in TASK_COLORS.items()
    }
    rows = []
    for device, share in enumerate(timeline.idle_shares(events)):
        boxes = [
            Box(
                start,
                end_of_task - start,
                to_hex(shades[task.kind](places.get(task.cell, 0) / last)),
                () if task.kind == "update" else (str(task.micro_batch),),
                f"{task.kind}-{task.cell}-{task.micro_batch}",
                0.5 if task.kind == "recompute" else _HEIGHT,
            )
            for task, place, start, end_of_task in events
            if place == device
        ]
        rows.append(Row(f"device {device}", boxes, f"{share:.1%} idle"))
    kinds = {event.task.kind for event in events}
    legend: dict[str, str] = {
        timeline.name(kind): color
        for kind, (color, _) in TASK_COLORS.items()
        if kind in kinds
    }
    legend["idle"] = _IDLE
    unit, factor = ("s", 1) if total >= 10 else ("ms", 1000)
    is_shaded = max(places.values()) > 0
    lighter = "; the first cells of a device are the darkest" * is_shaded
    forward = statistics.median(
        end - start for task, _, start, end in events if task.kind == "forward"
    )
    slots = total / max(forward, 0.001 * total)
    return Picture(
        rows,
        total,
        max(total, ideal or 0.0, end),
        title,
        subtitle,
        legend,
        f"time ({unit}){lighter}",
        factor,
        None if ideal is None else (ideal, "ideal end"),
        width=min(max(0.11 * slots, 8.8), 18.0),
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
    kinds = sorted(costs, key=lambda kind: -costs[kind])
    legend: dict[str, str] = dict(zip(kinds, _KIND_COLORS))
    calls, rows = zip(steps, shares), []
    for cell in cells:
        boxes, start = [], 0.0
        for i, (step, share) in enumerate(islice(calls, len(cell.layers))):
            color = legend.get(_kind(step), _OTHER_KINDS)
            names = _names(step, built.source.model)
            name = f"call-{cell.index}-{i}"
            boxes.append(Box(start, share, color, names, name))
            start += share
        label = f"cell {cell.index}\n{_devices(cell.devices)}"
        rows.append(
            Row(label, boxes, f"{start:.1%}, {_mib(cell.weight_bytes)}")
        )
    if len(legend) < len(kinds):
        legend["others"] = _OTHER_KINDS
    unit = f" {cells[0].unit}" if cells[0].unit else ""
    subtitle = (
        f"{len(steps):,} calls, which cost {total:.3g}{unit}; "
        f"{_mib(sum(cell.weight_bytes for cell in cells))} of weights"
    )
    if total and len(cells) > 1:
        slowest = max(cells, key=lambda cell: cell.cost)
        ratio = slowest.cost * len(cells) / total
        subtitle += f"; cell {slowest.index} costs {ratio:.2f} times the mean"
    longest = max(row.boxes[-1].start + row.boxes[-1].width for row in rows)
    return Picture(
        rows,
        longest,
        longest,
        f"{model.name}: K = {len(cells)}",
        subtitle,
        legend,
        "share of the cost of all calls (%)",
        100,
        (1 / len(rows), "mean") if len(rows) > 1 else None,
    )


def _names(step: Any, model: Any) -> list[str]:
    """Returns the layer's name, with ever fewer of the layers around it."""
    around = [layer.name for layer in step.section.around if layer is not model]
    names = ["/".join(around[i:]) for i in range(len(around))]
    return names or [step.layer.name]


def _kind(step: Any) -> str:
    """Returns the class of what is called; legends leave out a leading _."""
    called = step.section.operation
    return "no call" if called is None else type(called).__name__.lstrip("_")


def _devices(names: Sequence[str]) -> str:
    """Returns the devices of a cell, one a replica, in words."""
    texts = []
    for name in names[:_MOST_NAMES]:
        spec = tf.DeviceSpec.from_string(name)
        is_here = spec.job in (None, "localhost")
        host = "" if is_here else f"{spec.job} {spec.task or 0} "
        texts.append(f"{host}{spec.device_type}:{spec.device_index}")
    more = len(names) - _MOST_NAMES
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _mib(num_bytes: int) -> str:
    """Returns a size as a text.

    Example:

    >>> _mib(0), _mib(300_000), _mib(300_000_000)
    ('0 MiB', '0.286 MiB', '286 MiB')
    """
    return f"{num_bytes / 2**20:.3g} MiB"
