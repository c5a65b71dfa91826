"""Pictures of a step."""

import itertools
import re

import matplotlib.image
import matplotlib.style
import numpy as np
import pytest
from simulated import events

from tfgpipe.monitor import gantt, picture
from tfgpipe.schedules import CHUNKS, SCHEDULES


def drawn(made, tmp_path, name="a", **caption):
    paths = [tmp_path / f"{name}.{end}" for end in ("svg", "png")]
    gantt.save(made, gantt.Caption("1f1b: K = 2", **caption), paths)
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture_has_a_box_a_task(name, tmp_path):
    made = events(name, chunks=CHUNKS[name] or 1, updates=True)
    svg = drawn(made, tmp_path)[0].decode()
    boxes = re.findall(r'<g id="([a-z_]+-\d+-[-\d]+)"', svg)
    expected = [f"{t.kind}-{t.cell}-{t.micro_batch}" for t, *_ in made]
    assert sorted(boxes) == sorted(expected)


def texts(svg):
    """What is written, in the comments beside the shapes of the letters."""
    return re.findall(r"<!-- (.*) -->", svg.decode())


def test_picture_says_what_it_shows(tmp_path):
    made = events("interleaved", 2, 4, 2, updates=True)
    svg, png = drawn(made, tmp_path, subtitle="bubble 1%", ideal=9.0)
    found = texts(svg)
    for text in (
        "1f1b: K = 2",
        "bubble 1%",
        "ideal end",
        "device 1",
        "time (s)",
        "recompute",
        "backward",
        "update",
        "cells 0 to 1",
        "cells 2 to 3",
    ):
        assert text in found
    # Each of the two cells: forward, recomputed once less, backward.
    assert found.count("3") == 2 * (2 + 2 + 2)
    assert png.startswith(b"\x89PNG")


@pytest.mark.parametrize("ideal", [9.0, 14.0, 15.0, 40.0])
def test_ideal_end_has_its_line_wherever_it_is(ideal):
    made = events()  # they end after 14 seconds
    picture = gantt.figure(made, gantt.Caption("a", ideal=ideal))
    (axes,) = picture.axes
    (line,) = axes.lines
    (label,) = [t for t in axes.texts if t.get_text() == "ideal end"]
    assert line.get_xdata() == [ideal, ideal] and label.xy[0] == ideal
    assert axes.get_xlim() == (0, max(ideal, 14.0))
    assert not line.get_clip_on()  # it is as wide at the end of the axis


@pytest.mark.parametrize(("end", "expected"), [(9.0, 14.0), (20.0, 20.0)])
def test_axis_of_several_pictures_is_as_long_as_asked_for(end, expected):
    picture = gantt.figure(events(), gantt.Caption("a", end=end))
    assert picture.axes[0].get_xlim() == (0, expected)


def test_pixels_have_the_colours_that_were_drawn(tmp_path):
    made = events("zero_bubble_v", 4, 8, 2)
    drawn(made, tmp_path)
    with matplotlib.style.context(["default", picture._SETTINGS]):
        full = gantt.figure(made, gantt.Caption("1f1b: K = 2"))
        full.savefig(tmp_path / "full.png", dpi=160)
    found, expected = (
        matplotlib.image.imread(tmp_path / name)
        for name in ("a.png", "full.png")
    )
    difference = np.abs(found[..., :3] - expected[..., :3])
    assert found.shape[:2] == expected.shape[:2] and difference.max() < 0.05


@pytest.mark.parametrize(
    "word", ["layer", "'Embedding_and_memory_12'", "12, 13,"]
)
@pytest.mark.parametrize("count", [1, 10, 60])
def test_subtitle_is_whole_and_within_the_picture(word, count):
    subtitle = " ".join([word] * count)
    picture = gantt.figure(events(), gantt.Caption("a", subtitle))
    title, *lines = picture.texts
    assert " ".join(line.get_text() for line in lines) == subtitle
    renderer = picture.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in (title, *lines)]
    assert max(box.x1 for box in boxes) < picture.bbox.x1
    for above, below in itertools.pairwise(boxes):
        assert below.y1 < above.y0
    assert picture.axes[0].bbox.y1 + 20 < boxes[-1].y0  # room for the mark


def test_numbers_that_do_not_fit_are_left_out(tmp_path):
    made = events("gpipe", 1, 300, remat=False)
    assert "299" not in texts(drawn(made, tmp_path)[0])
    assert "299" in texts(drawn(made[290:310], tmp_path)[0])


def test_equal_events_give_equal_files(tmp_path, monkeypatch):
    first = drawn(events(), tmp_path)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(matplotlib.rcParams, "axes.grid", True)
    assert drawn(events(), tmp_path, name="b") == first
