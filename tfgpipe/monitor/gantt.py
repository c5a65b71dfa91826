"""Draws when each device ran which task: a row a device, a box a task.

Equal events give equal files, see `picture.py`.

The colours are those of Okabe and Ito, which colour-blind people tell apart,
made darker or lighter where they would be the same grey. Recomputations have
lower boxes too. Where a device has several cells, the first is the darkest.

Reference: [Okabe and Ito, 2008](https://jfly.uni-koeln.de/color/)
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import patches
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from tfgpipe import timeline
from tfgpipe.monitor.picture import DIGIT, Frame, edge, ink, mark, note
from tfgpipe.monitor.picture import save as save_figure
from tfgpipe.run import Event

# Inches, as all sizes of the figure.
_ROW, _LEFT, _RIGHT, _BOTTOM = 0.42, 0.85, 0.8, 0.9

_SLOT, _WIDTH = 0.11, (9.0, 18.0)  # of a forward task, if the limits allow

_FONT_SIZES = (5.0, 9.0)  # of micro-batches' numbers, in points


class Caption(NamedTuple):
    """What is written around a picture.

    Attributes:
        title: What ran.
        subtitle: What came out; in as many lines as it needs.
        ideal: Seconds that the tasks should take; `None` for no mark.
        end: Seconds to which the axis goes at least, so that pictures of
            different lengths can be compared.
    """

    title: str
    subtitle: str = ""
    ideal: float | None = None
    end: float = 0.0


def save(
    events: Sequence[Event], caption: Caption, paths: Sequence[pathlib.Path]
) -> None:
    """Draws the events, at least one, into files.

    The suffixes of the paths, ".png" or ".svg", say what they become.
    """
    save_figure(lambda: figure(events, caption), paths)


def figure(events: Sequence[Event], caption: Caption) -> Figure:
    """The figure of events, at least one; each box is called after its task."""
    num_devices = 1 + max(event.device for event in events)
    total = max(event.end for event in events)
    end = max(total, caption.ideal or 0.0, caption.end)
    slots = total / max(timeline.forward_time(events), 0.001 * total)
    width = _LEFT + min(max(_SLOT * slots, _WIDTH[0]), _WIDTH[1]) + _RIGHT
    frame = Frame(
        width, num_devices * _ROW, _LEFT, _RIGHT, _BOTTOM, caption.subtitle
    )
    picture, axes = frame.figure()
    axes.set_xlim(0, end)
    axes.set_ylim(num_devices - 0.5, -0.5)
    _draw_rows(axes, events)
    _draw_boxes(axes, events, scale=72 * frame.inner / end)
    _draw_axis(axes, total)
    frame.write(picture, caption.title)
    if caption.ideal is not None:
        mark(axes, caption.ideal, "ideal end")
    frame.draw_legend(picture, _legend(events))
    return picture


def _draw_rows(axes: Axes, events: Sequence[Event]) -> None:
    """The background of every device, with its name and its idle share."""
    shares = timeline.idle_shares(events)
    names = [f"device {device}" for device in range(len(shares))]
    axes.set_yticks(range(len(shares)), names)
    total = max(event.end for event in events)
    for device, share in enumerate(shares):
        height = STYLES["forward"].height
        axes.add_patch(
            patches.Rectangle(
                (0, device - height / 2), total, height, color=IDLE, zorder=0
            )
        )
        note(axes, device, f"{share:.1%} idle")


def _draw_boxes(axes: Axes, events: Sequence[Event], scale: float) -> None:
    """The tasks, with the numbers of their micro-batches where they fit.

    `scale` is points a second.
    """
    place = timeline.places(events)
    last = max(place.values())
    sizes = _font_sizes(events, scale)
    for task, device, start, end in events:
        style = STYLES[task.kind]
        color = style.color(place.get(task.cell, 0), last)
        axes.add_patch(
            patches.Rectangle(
                (start, device - style.height / 2),
                end - start,
                style.height,
                facecolor=color,
                edgecolor="white",
                linewidth=edge((end - start) * scale),
                gid=f"{task.kind}-{task.cell}-{task.micro_batch}",
            )
        )
        size, needed, rotation = sizes.get(task.kind, (0, 0, 0))
        if size and (end - start) * scale >= 0.9 * needed:
            axes.text(
                (start + end) / 2,
                device,
                str(task.micro_batch),
                ha="center",
                va="center_baseline" if not rotation else "center",
                fontsize=size,
                color=ink(color),
                rotation=rotation,
            )


def _font_sizes(
    events: Sequence[Event], scale: float
) -> dict[str, tuple[float, float, int]]:
    """The numbers of each kind: their size, the points they need, rotation.

    Where they do not fit upright, they may if turned; or there are none.
    """
    smallest, largest = _FONT_SIZES
    digits = len(str(max(event.task.micro_batch for event in events)))
    sizes: dict[str, tuple[float, float, int]] = {}
    for kind in STYLES:
        widths = sorted(
            (event.end - event.start) * scale
            for event in timeline.scheduled(events)
            if event.task.kind == kind and event.end > event.start
        )
        if not widths:
            continue
        typical = widths[len(widths) // 10]  # nearly all are wider
        for needed, rotation in ((digits * DIGIT + 0.15, 0), (0.85, 90)):
            size = min(typical / needed, largest)
            if size >= smallest:
                sizes[kind] = (size, needed, rotation)
                break
    # Not too different from each other.
    most = 1.4 * min((size for size, _, _ in sizes.values()), default=0)
    return {
        kind: (min(size, most), min(size, most) * needed, rotation)
        for kind, (size, needed, rotation) in sizes.items()
    }


def _draw_axis(axes: Axes, total: float) -> None:
    unit, factor = ("s", 1) if total >= 10 else ("ms", 1000)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x * factor:,.6g}")
    axes.set_xlabel(f"time ({unit})", fontsize=9)


def _legend(events: Sequence[Event]) -> list[patches.Patch]:
    """What the colours mean, and the shades where there are several."""
    kinds = {event.task.kind for event in events}
    place = timeline.places(events)
    last = max(place.values())
    handles = [
        patches.Patch(color=STYLES[kind].dark, label=timeline.name(kind))
        for kind in STYLES
        if kind in kinds
    ]
    handles.append(patches.Patch(fc=IDLE, ec="#BBBBBB", lw=0.5, label="idle"))
    for index in range(last + 1 if last else 0):
        cells = sorted(cell for cell in place if place[cell] == index)
        color = Style("#505050", "#B8B8B8").color(index, last)
        handles.append(patches.Patch(color=color, label=_cells(cells)))
    return handles


def _cells(cells: list[int]) -> str:
    if len(cells) == 1:
        return f"cell {cells[0]}"
    if cells == list(range(cells[0], cells[-1] + 1)):
        return f"cells {cells[0]} to {cells[-1]}"
    return f"cells {', '.join(map(str, cells))}"


class Style(NamedTuple):
    """How the boxes of a kind of task look.

    Attributes:
        dark: Colour of a device's first cell.
        light: Colour of its last, if there are several.
        height: In rows.
    """

    dark: str
    light: str
    height: float = 0.84

    def color(self, place: int, last: int) -> tuple[float, float, float]:
        """The colour of a cell: red, green and blue, up to 1.

        `place` is among those of its device, from 0 to `last`.
        """
        share = place / last if last else 0
        ends = zip(to_rgb(self.dark), to_rgb(self.light))
        red, green, blue = (
            (1 - share) * dark + share * light for dark, light in ends
        )
        return red, green, blue


STYLES = {
    "forward": Style("#00558A", "#4A96CB"),
    "recompute": Style("#56B4E9", "#9AD3F3", 0.48),
    "backward": Style("#E69F00", "#F5CE78"),
    "input_gradient": Style("#D55E00", "#E88F4E"),
    "weight_gradient": Style("#F0E442", "#F7F09A"),
    "head": Style("#009E73", "#6FCBAE"),
    "update": Style("#000000", "#000000"),
}

IDLE = "#F3F3F3"
