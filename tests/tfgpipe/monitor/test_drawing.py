"""Pictures of steps and of cells."""

import ast
import pathlib
import re

import keras
import matplotlib
import pytest
from keras import layers as kl
from simulated import events

import tfgpipe
from tfgpipe.monitor import drawing, plot_cells, save_picture


def test_timeline_in_a_file_has_its_numbers(tmp_path):
    path = tmp_path / "a.svg"
    save_picture(events(), "Epoch 3", "move layer 'a'", path)
    texts = re.findall(r"<!-- *(.*) -->", path.read_text())
    assert "Epoch 3: bubble 21%, the tasks take 14.0 s" in texts
    assert {"move layer 'a'", "device 1", "21.4% idle"} <= {*texts}


# --------------------------------------------------------------------- cells
def model(costs=(1, 3, 2, 2), k=2, names="abcd", **kwargs):
    items = [(kl.Dense(2, name=name), cost) for name, cost in zip(names, costs)]
    return tfgpipe.GPipe([keras.Input((2,)), *items], k, name="m", **kwargs)


def test_cells_have_a_box_a_call_as_wide_as_its_cost():
    devices = ["CPU:3", "CPU:1"]
    picture = drawing.cells_picture(
        model(layers_per_cell=[3, 1], devices=devices)
    )
    assert [[box.width for box in row.boxes] for row in picture.rows] == [
        pytest.approx([1 / 8, 3 / 8, 2 / 8]),
        pytest.approx([2 / 8]),
    ]
    assert [row.label for row in picture.rows] == [
        "cell 0\nCPU:3",
        "cell 1\nCPU:1",
    ]
    assert [row.note[:5] for row in picture.rows] == ["75.0%", "25.0%"]
    assert picture.subtitle.startswith("4 calls, which cost 8; ")
    texts = [text.get_text() for text in picture.figure().axes[0].texts]
    assert {"a", "b", "c", "d", "mean"} <= {*texts}


# --------------------------------------------------------------------- files
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_models_give_equal_files(suffix, tmp_path, monkeypatch):
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    plot_cells(model(), first)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    plot_cells(model(), str(second))
    assert first.read_bytes() == second.read_bytes()
    assert len([*tmp_path.iterdir()]) == 2


def test_other_models_have_no_cells(tmp_path):
    plain = keras.Sequential([keras.Input((2,))], name="plain")
    with pytest.raises(ValueError, match=r"'plain', a Sequential. Draw .*"):
        plot_cells(plain, tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"plot_cells.*model.build"):
        plot_cells(tfgpipe.GPipe([kl.Dense(2)], 1), tmp_path / "a.png")


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
