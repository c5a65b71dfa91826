"""Pictures of cells."""

import importlib.util
import re

import keras
import matplotlib
import pytest
from keras import layers as kl

import tfgpipe
from tfgpipe.monitor import cell_bars, picture


def model(costs=(1, 3, 2, 2), k=2, names="abcd", **kwargs):
    items = [(kl.Dense(2, name=name), cost) for name, cost in zip(names, costs)]
    return tfgpipe.GPipe([keras.Input((2,)), *items], k, name="m", **kwargs)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a model; returns the figure."""

    def drawn(made):
        found = []
        monkeypatch.setattr(
            picture, "save", lambda draw, paths: found.append(draw())
        )
        tfgpipe.plot_cells(made, tmp_path / "a.png")
        return found[0]

    return drawn


def boxes(figure):
    """By cell and call: the left end and the width of the box."""
    found = {}
    for box in figure.axes[0].patches:
        kind, *place = (box.get_gid() or "").split("-")
        if kind == "call":
            found[tuple(map(int, place))] = box.get_x(), box.get_width()
    return found


def texts(figure):
    written = [*figure.texts, *figure.axes[0].texts]
    return [text.get_text() for text in written]


def test_row_has_a_box_a_call_as_wide_as_its_cost(drawn):
    figure = drawn(model(layers_per_cell=[3, 1]))
    assert boxes(figure) == {
        (0, 0): (0, pytest.approx(1 / 8)),
        (0, 1): (pytest.approx(1 / 8), pytest.approx(3 / 8)),
        (0, 2): (pytest.approx(4 / 8), pytest.approx(2 / 8)),
        (1, 0): (0, pytest.approx(2 / 8)),
    }
    ids = [p.get_gid() for p in figure.axes[0].patches]
    assert [i for i in ids if "cell" in i] == ["cell-0", "cell-1"]
    assert sum(width for _, width in boxes(figure).values()) == pytest.approx(1)


def test_row_says_what_the_cell_is(drawn):
    written = texts(drawn(model(devices=["CPU:3", "CPU:1"])))
    assert {"a", "b", "c", "d", "cell 0", "cell 1"} <= {*written}
    assert {"CPU:3", "CPU:1", "mean", "cost", "weights"} <= {*written}
    assert written.count("50.0%") == written.count("< 0.01 MiB") == 2
    assert written[:2] == [
        "m: 2 cells",
        "4 calls, which cost 8; < 0.01 MiB of weights; cell 0 costs 1.00 times "
        "the mean",
    ]


def test_weights_are_those_of_the_records(drawn):
    wide = tfgpipe.GPipe(
        [keras.Input((1024,)), kl.Dense(1024), kl.Dense(256)], 2
    )
    assert [cell.weight_bytes for cell in wide.cells()] == [
        4 * cell.num_params for cell in wide.cells()
    ]
    assert {"4.00 MiB", "1.00 MiB", "5.00 MiB of weights"} <= {
        part for text in texts(drawn(wide)) for part in text.split("; ")
    }


def test_names_are_written_where_they_fit(drawn):
    names = ["a" * 300, "narrow", "block_of_" + "b" * 90, "$c$"]
    written = texts(drawn(model([300, 1, 300, 300], 1, names)))
    assert "block_of_\n" + "b" * 90 not in written  # too wide in two lines too
    assert "$c$" in written and "narrow" not in written
    names[2] = "block_with_a_long_name_inside"
    written = texts(drawn(model([900, 1, 200, 900], 1, names)))
    assert "block_with_a_\nlong_name_inside" in written


def test_very_many_calls_are_narrow_boxes(drawn):
    layers = [kl.Dense(2) for _ in range(400)]
    figure = drawn(tfgpipe.GPipe([keras.Input((2,)), *layers], 4))
    assert len(boxes(figure)) == 400
    assert not any("dense" in text for text in texts(figure))
    assert figure.get_size_inches()[0] < 12


def test_cells_that_cost_nothing_are_equal(drawn):
    figure = drawn(model([0, 0, 0, 0]))
    assert {width for _, width in boxes(figure).values()} == {0.25}


def test_replicas_and_groups_are_one_row_a_cell(drawn):
    with tfgpipe.PipelineStrategy(3, 2).scope():
        made = model(remat_groups=2)
    figure = drawn(made)
    assert len(boxes(figure)) == 4
    assert {"CPU:0, CPU:2 and 1 more", "cell 1"} <= {*texts(figure)}
    assert "cell 2" not in texts(figure)


def test_parts_of_a_nested_model_are_calls(drawn):
    inner = [kl.Dense(2, name="one"), kl.Dense(2, name="two")]
    outer = keras.Sequential([keras.Input((2,)), *inner], name="outer")
    figure = drawn(tfgpipe.GPipe([keras.Input((2,)), outer], 2))
    assert [*boxes(figure)] == [(0, 0), (1, 0)]
    assert {"outer/one", "outer/two"} <= {*texts(figure)}
    # What does not fit is named without what is around it.
    inner = [kl.Dense(2, name=f"one_of_many_{i}") for i in range(12)]
    outer = keras.Sequential([keras.Input((2,)), *inner], name="o" * 30)
    figure = drawn(tfgpipe.GPipe([keras.Input((2,)), outer], 1))
    assert "one_of_\nmany_0" in texts(figure)


def test_calls_of_a_model_with_its_own_call_have_names(drawn):
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.block = keras.Sequential([kl.Dense(2, name="one")], name="in")
            self.two = kl.Dense(2, name="two")

        def call(self, x):
            return self.two(self.block(x + 1.0))

    made = tfgpipe.GPipe(Own(), 2)
    made.build((None, 2))
    assert {"in/one", "two"} <= {*texts(drawn(made))}


def kinds(figure):
    (legend,) = figure.legends
    return {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.get_texts(), legend.get_patches())
    }


def test_kinds_have_colours_and_the_cheapest_share_one():
    rows = [
        cell_bars.Row(
            "CPU:0",
            [cell_bars.Call(["x"], f"Kind{i}", i / 45) for i in range(10)],
            "1 MiB",
        )
    ]
    found = kinds(cell_bars.figure(rows, "a", "b"))
    assert [*found] == [*(f"Kind{i}" for i in range(9, 3, -1)), "others"]
    assert len({*found.values()}) == 7


def test_legend_of_long_names_is_within_the_picture():
    rows = [
        cell_bars.Row(
            "CPU:0",
            [cell_bars.Call(["x"], f"{i}" * 40, 0.2) for i in range(5)],
            "1 MiB",
        )
    ]
    figure = cell_bars.figure(rows, "a", "b")
    (legend,) = figure.legends
    figure.canvas.draw()
    box = legend.get_window_extent(figure.canvas.get_renderer())
    assert 0 < box.x0 < box.x1 < figure.bbox.x1
    label = figure.axes[0].xaxis.label.get_window_extent()
    assert 0 < box.y0 < box.y1 < label.y0


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_models_give_equal_files(suffix, tmp_path, monkeypatch):
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    tfgpipe.plot_cells(model(), first)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    tfgpipe.plot_cells(model(), str(second))
    assert first.read_bytes() == second.read_bytes()
    assert len([*tmp_path.iterdir()]) == 2
    if suffix == "svg":
        found = re.findall(r'<g id="(call-\d-\d)"', first.read_text())
        assert len(found) == 4


# -------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cells.pdf", r"must end with .png or .svg. .*pdf.*'.*cells.png', say"),
        ("cells", r"must end with .png or .svg"),
        ("no/cells.png", r"in a folder that there is. .*no/cells.png"),
        ("folder.png", r"must be a file"),
    ],
)
def test_bad_file_is_told(name, message, tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=rf"`to_file` {message}|{message}"):
        tfgpipe.plot_cells(model(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_plain_model_has_no_cells(tmp_path):
    plain = keras.Sequential([keras.Input((2,))], name="plain")
    message = r"'plain', a Sequential. Pass .*keras.utils.plot_model"
    with pytest.raises(ValueError, match=message):
        tfgpipe.plot_cells(plain, tmp_path / "a.png")


def test_model_that_is_not_built_has_no_cells(tmp_path):
    made = tfgpipe.GPipe([kl.Dense(2)], 1)
    with pytest.raises(ValueError, match=r"plot_cells.*model.build"):
        tfgpipe.plot_cells(made, tmp_path / "a.png")


def test_missing_matplotlib_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"a.svg.*pip install matplotlib"):
        tfgpipe.plot_cells(model(), tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
