"""Pictures that depend on nothing but what they show.

Nothing is taken from the machine, neither a display nor fonts nor settings of
the user, so that equal contents give equal files.
"""

import io
import pathlib
import textwrap
from collections.abc import Callable, Sequence

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from tfgpipe.files import put_in_place

# Inches: above the rows; from a line of the subtitle to the next.
_TOP, _LINE = 0.86, 0.18

DIGIT = 0.64  # width of a digit in font sizes; most letters have less

_SUBTITLE = 9.5  # its font size, in points

_SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "svg.fonttype": "path",
    "svg.hashsalt": "tfgpipe",  # or identifiers are random
    "text.parse_math": False,  # names are written as they are
}


def save(draw: Callable[[], Figure], paths: Sequence[pathlib.Path]) -> None:
    """Writes a figure, which `draw` makes, into files.

    The suffixes of the paths, ".png" or ".svg", say what they become.
    """
    write = {".png": _write_png, ".svg": _write_svg}
    with matplotlib.style.context(["default", _SETTINGS]):
        picture = draw()
        for path in paths:
            with put_in_place(path) as beside:
                write[path.suffix](picture, beside)


def _write_png(picture: Figure, path: str) -> None:
    """Writes pixels of 256 colours: a third of the bytes, and as good."""
    with io.BytesIO() as pixels:
        picture.savefig(pixels, format="png", dpi=160)
        image = Image.open(pixels).convert("RGB")
    # Its colours are within a few of 255 of what was drawn.
    few = image.quantize(
        256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )
    few.save(path, "PNG", optimize=True)


def _write_svg(picture: Figure, path: str) -> None:
    # A date would make equal pictures differ.
    picture.savefig(path, format="svg", metadata={"Date": None})


class Frame:
    """Inches around the rows of a picture.

    Args:
        width: Of the whole picture.
        rows: Height of all rows together.
        left: Width of what is left of them.
        right: Width of what is right of them.
        bottom: Height of what is below them.
        subtitle: In as many lines as it needs.
    """

    def __init__(
        self,
        width: float,
        rows: float,
        left: float,
        right: float,
        bottom: float,
        subtitle: str,
    ) -> None:
        digits = (width - left) * 72 / (_SUBTITLE * DIGIT)
        self._lines = textwrap.wrap(subtitle, int(digits))
        top = _TOP + _LINE * max(len(self._lines) - 1, 0)
        self._left, self._width = left, width
        self._height = top + rows + bottom
        self._bottom, self._rows = bottom, rows
        self.inner = width - left - right  # width of the rows

    def figure(self) -> tuple[Figure, Axes]:
        """An empty picture, and a place for the rows."""
        width, height = self._width, self._height
        picture = Figure((width, height))
        FigureCanvasAgg(picture)
        axes = picture.add_axes(
            (
                self._left / width,
                self._bottom / height,
                self.inner / width,
                self._rows / height,
            )
        )
        axes.tick_params("x", labelsize=9)
        axes.tick_params("y", labelsize=9, length=0)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        return picture, axes

    def write(self, picture: Figure, title: str) -> None:
        """The title, and the lines of the subtitle below it."""
        for index, line in enumerate([title, *self._lines]):
            down = 0.51 + _LINE * (index - 1) if index else 0.26
            picture.text(
                self._left / self._width,
                1 - down / self._height,
                line,
                fontsize=_SUBTITLE if index else 13,
                color="#333333" if index else "black",
                va="center",
            )

    def draw_legend(
        self,
        picture: Figure,
        handles: Sequence[Patch],
        columns: int | None = None,
    ) -> None:
        """What the colours mean, at the bottom; in one line for None."""
        picture.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(self._left / self._width, 0.1 / self._height),
            borderaxespad=0,
            borderpad=0,
            ncols=columns or len(handles),
            frameon=False,
            fontsize=9,
            handlelength=1.2,
            handleheight=1.0,
            columnspacing=1.6,
        )


def mark(axes: Axes, x: float, label: str, is_behind: bool = False) -> None:
    """A line at some place, and its name; behind or before the boxes."""
    # It may be at the end of the axis, where half of it would be cut off.
    axes.axvline(
        x,
        color="black",
        lw=1,
        ls=(0, (3, 2)),
        clip_on=False,
        zorder=0.5 if is_behind else 2,
    )
    axes.annotate(
        label,
        (x, 1),
        (2, 3),
        ("data", "axes fraction"),
        "offset points",
        ha="right",
        fontsize=8,
    )


def note(
    axes: Axes, row: float, text: str, points: float = 6.0, ha: str = "left"
) -> None:
    """What is written right of a row, from or up to so many points from it."""
    axes.annotate(
        text,
        (1, row),
        (points, 0),
        ("axes fraction", "data"),
        "offset points",
        ha=ha,
        va="center",
        fontsize=8,
        color="#444444",
    )


def edge(points: float) -> float:
    """How wide the white line around a box of this width is."""
    return min(0.6, points / 8)


def ink(color: tuple[float, ...]) -> str:
    """Black or white, whichever is easier to read on the colour."""
    red, green, blue = (part**2.2 for part in color)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if luminance > 0.18 else "white"
