"""The pictures of the documentation are those that the command draws."""

import pathlib
import re

import numpy as np
import pytest
from matplotlib.image import imread
from quick import quick

from tools import gallery

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_pages_show_every_picture():
    shown = [
        name
        for page in ("schedules.md", "cells.md")
        for name in re.findall(
            r"^!\[[^\]]+\]\((gallery_\w+\.png)\)$",
            (DOCS / page).read_text("utf-8"),
            re.M,
        )
    ]
    assert shown == [*gallery.PICTURES]
    assert {path.name for path in DOCS.glob("gallery_*")} == {*shown}
    assert sum((DOCS / name).stat().st_size for name in shown) < 600_000


@pytest.mark.parametrize(
    "name",
    quick(gallery.PICTURES, ["gallery_1f1b.png", "gallery_zero_bubble_v.png"]),
)
def test_picture_is_that_of_the_documentation(name, tmp_path):
    """But for the shapes of letters, which versions of matplotlib change."""
    gallery.PICTURES[name](tmp_path / name)
    drawn, kept = imread(tmp_path / name), imread(DOCS / name)
    assert drawn.shape == kept.shape
    assert np.mean(np.abs(drawn - kept).max(-1) > 0.1) < 0.02
