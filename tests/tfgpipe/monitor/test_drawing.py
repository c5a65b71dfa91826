"""Pictures of steps and of cells."""

import ast
import itertools
import pathlib
import re

import keras
import matplotlib
import pytest
from keras import layers as kl
from simulated import events

import tfgpipe
from tfgpipe.monitor import drawing, plot_cells, save_picture
from tfgpipe.monitor.plot_cells import picture_of_cells
from tfgpipe.schedules import CHUNKS, SCHEDULES


def boxes(picture):
    """Names, starts and widths of boxes, row by row."""
    return [
        [(box.name, box.start, box.width) for box in row.boxes]
        for row in picture.rows
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_timeline_has_a_box_a_task(name):
    tasks = events(name, chunks=CHUNKS[name] or 1, updates=True)
    drawn = sorted(itertools.chain(*boxes(drawing.timeline_picture(tasks, ""))))
    assert drawn == sorted(
        (f"{t.kind}-{t.cell}-{t.micro_batch}", start, end - start)
        for t, _, start, end in tasks
    )


def test_timeline_says_what_it_shows():
    tasks = events("interleaved", 2, 4, 2, updates=True)
    picture = drawing.timeline_picture(tasks, "a", "b " * 200, 9.0, 40.0)
    assert picture.mark == (9.0, "ideal end") and picture.length == 40
    assert {"forward", "recompute", "backward", "update"} < {*picture.legend}
    figure = picture.figure()
    title, *lines = [text.get_text() for text in figure.texts]
    assert title == "a" and " ".join(lines).split() == ["b"] * 200
    figure.canvas.draw()
    extents = [text.get_window_extent() for text in figure.texts]
    assert max(extent.x1 for extent in extents) < figure.bbox.x1
    for above, below in itertools.pairwise(extents):
        assert below.y1 < above.y0


def test_timeline_in_a_file_has_its_numbers(tmp_path):
    path = tmp_path / "a.svg"
    save_picture(events(), "Epoch 3", "move layer 'a'", path)
    texts = re.findall(r"<!-- (.*) -->", path.read_text())
    assert "Epoch 3: bubble 21%, the tasks take 14.0 s" in texts
    assert {"move layer 'a'", "device 1", "21.4% idle"} <= {*texts}


def luminance(color):
    red, green, blue = (part**2.2 for part in matplotlib.colors.to_rgb(color))
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * light ** (1 / 3) - 16


def test_colors_differ_in_greyscale():
    in_both_cells = itertools.chain(
        *(drawing.TASK_COLORS[kind] for kind in ("forward", "backward"))
    )
    halves = ("forward", "input_gradient", "weight_gradient")
    in_one_cell = (drawing.TASK_COLORS[kind][0] for kind in halves)
    for colors in (in_both_cells, in_one_cell):
        shades = sorted([0, 100, *map(luminance, colors)])
        assert min(b - a for a, b in itertools.pairwise(shades)) > 10


# --------------------------------------------------------------------- cells
def model(costs=(1, 3, 2, 2), k=2, names="abcd", **kwargs):
    items = [(kl.Dense(2, name=name), cost) for name, cost in zip(names, costs)]
    return tfgpipe.GPipe([keras.Input((2,)), *items], k, name="m", **kwargs)


def test_cells_have_a_box_a_call_as_wide_as_its_cost():
    devices = ["CPU:3", "CPU:1"]
    picture = picture_of_cells(model(layers_per_cell=[3, 1], devices=devices))
    assert boxes(picture) == [
        [
            ("call-0-0", 0, pytest.approx(1 / 8)),
            ("call-0-1", pytest.approx(1 / 8), pytest.approx(3 / 8)),
            ("call-0-2", pytest.approx(4 / 8), pytest.approx(2 / 8)),
        ],
        [("call-1-0", 0, pytest.approx(2 / 8))],
    ]
    assert [row.label for row in picture.rows] == [
        "cell 0\nCPU:3",
        "cell 1\nCPU:1",
    ]
    assert [row.note[:5] for row in picture.rows] == ["75.0%", "25.0%"]
    assert picture.subtitle.endswith("cell 0 costs 1.50 times the mean")
    texts = [text.get_text() for text in picture.figure().axes[0].texts]
    assert {"a", "b", "c", "d", "mean"} <= {*texts}


def test_cells_that_cost_nothing_are_equal():
    drawn = boxes(picture_of_cells(model([0, 0, 0, 0])))
    assert {width for row in drawn for _, _, width in row} == {0.25}


def test_replicas_and_groups_are_one_row_a_cell():
    with tfgpipe.PipelineStrategy(3, 2).scope():
        in_groups = model(remat_groups=2)
    labels = [row.label for row in picture_of_cells(in_groups).rows]
    assert len(labels) == 2 and "CPU:0, CPU:2 and 1 more" in labels[0]


def test_nested_layers_have_names_that_fit():
    inner = [kl.Dense(2, name="one"), kl.Dense(2, name="two")]
    outer = keras.Sequential([keras.Input((2,)), *inner], name="o" * 90)
    (row,) = picture_of_cells(tfgpipe.GPipe([keras.Input((2,)), outer], 1)).rows
    assert row.boxes[0].labels == [f"{'o' * 90}/one", "one"]
    texts = picture_of_cells(
        tfgpipe.GPipe([keras.Input((2,)), outer], 1)
    ).figure()
    assert "one" in [text.get_text() for text in texts.axes[0].texts]


def test_cheapest_kinds_share_a_colour():
    calls = [drawing.Call(["x"], f"Kind{i}", i / 45) for i in range(10)]
    picture = drawing.cells_picture({"a": (calls, "1 MiB")}, "", "")
    assert [*picture.legend] == [
        *(f"Kind{i}" for i in range(9, 3, -1)),
        "others",
    ]
    assert len({*picture.legend.values()}) == 7


# --------------------------------------------------------------------- files
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_models_give_equal_files(suffix, tmp_path, monkeypatch):
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    plot_cells(model(), first)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    plot_cells(model(), str(second))
    assert first.read_bytes() == second.read_bytes()
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("name", ["cells.pdf", "cells"])
def test_other_files_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="`to_file` must end with"):
        plot_cells(model(), tmp_path / name)


def test_other_models_have_no_cells(tmp_path):
    plain = keras.Sequential([keras.Input((2,))], name="plain")
    with pytest.raises(ValueError, match=r"'plain', a Sequential. Pass .*"):
        plot_cells(plain, tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"plot_cells.*model.build"):
        plot_cells(tfgpipe.GPipe([kl.Dense(2)], 1), tmp_path / "a.png")


def test_missing_matplotlib_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"a.svg.*pip install matplotlib"):
        plot_cells(model(), tmp_path / "a.svg")


def test_nothing_but_drawing_needs_matplotlib():
    """It is no requirement of the library."""
    package = pathlib.Path(tfgpipe.__file__).parent
    drawing_modules = set()
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [alias.name for alias in getattr(node, "names", [])]
            names.append(getattr(node, "module", None) or "")
            parts = {part for name in names for part in name.split(".")}
            if parts & {"drawing", "matplotlib", "PIL"}:
                drawing_modules.add(path.stem)
    assert drawing_modules == {"drawing"}
