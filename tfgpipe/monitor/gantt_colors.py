"""The colours of a Gantt picture.

They are those of Okabe and Ito, which colour-blind people tell apart, made
darker or lighter where they would be the same grey. Recomputations have lower
boxes too. Where a device has several cells, the first is the darkest.

Reference: [Okabe and Ito, 2008](https://jfly.uni-koeln.de/color/)
"""

from typing import NamedTuple

from matplotlib.colors import to_rgb


class Look(NamedTuple):
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

        Args:
            place: Of the cell among those of its device, from 0.
            last: The last place.
        """
        share = place / last if last else 0
        ends = zip(to_rgb(self.dark), to_rgb(self.light))
        red, green, blue = (
            (1 - share) * dark + share * light for dark, light in ends
        )
        return red, green, blue


LOOKS = {
    "forward": Look("#00558A", "#4A96CB"),
    "recompute": Look("#56B4E9", "#9AD3F3", 0.48),
    "backward": Look("#E69F00", "#F5CE78"),
    "input_gradient": Look("#D55E00", "#E88F4E"),
    "weight_gradient": Look("#F0E442", "#F7F09A"),
    "update": Look("#000000", "#000000"),
}
IDLE = "#F3F3F3"


def ink(color: tuple[float, ...]) -> str:
    """Black or white, whichever is easier to read on the colour."""
    red, green, blue = (part**2.2 for part in color)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if luminance > 0.18 else "white"
