"""Pictures of a step."""

import re

import pytest
from simulated import events

from tfgpipe.monitor import gantt
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


def test_numbers_that_do_not_fit_are_left_out(tmp_path):
    made = events("gpipe", 1, 300, remat=False)
    assert "299" not in texts(drawn(made, tmp_path)[0])
    assert "299" in texts(drawn(made[290:310], tmp_path)[0])


def test_equal_events_give_equal_files(tmp_path, monkeypatch):
    first = drawn(events(), tmp_path)
    monkeypatch.setitem(gantt.matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(gantt.matplotlib.rcParams, "axes.grid", True)
    assert drawn(events(), tmp_path, name="b") == first
