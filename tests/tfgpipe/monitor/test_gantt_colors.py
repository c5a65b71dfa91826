"""Colours that can be told apart."""

import itertools

import pytest

from tfgpipe.monitor.gantt import STYLES


def luminance(color):
    red, green, blue = (part**2.2 for part in color)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * light ** (1 / 3) - 16


@pytest.mark.parametrize(
    ("kinds", "last"),
    [
        (("forward", "backward"), 0),
        (("forward", "backward"), 1),  # two cells a device
        (("forward", "input_gradient", "weight_gradient"), 0),
    ],
)
def test_colors_differ_in_greyscale(kinds, last):
    shades = [luminance(STYLES["update"].color(0, last)), 100]
    for kind, place in itertools.product(kinds, range(last + 1)):
        shades.append(luminance(STYLES[kind].color(place, last)))
    shades.sort()
    assert min(b - a for a, b in itertools.pairwise(shades)) > 10
    # Recomputations have lower boxes instead.
    assert STYLES["recompute"].height < 0.6 * STYLES["forward"].height
