"""What a user sees of the cells."""

import keras
import pytest
from keras import layers as kl

import tfgpipe
from tfgpipe.model.groups import CellRecord, print_cells


def printed(show):
    lines = []
    show(lambda text, *_, **__: lines.extend(str(text).split("\n")))
    return lines


def test_table_has_a_line_for_every_layer():
    cells = [
        CellRecord(0, ("a", "bb"), "/device:GPU:0", 3e6, 1200),
        CellRecord(1, ("c",), "/device:GPU:1", 1e6, 0),
    ]
    assert printed(lambda write: print_cells(cells, write)) == [
        "cell  device         layers  params   cost  share",
        "0     /device:GPU:0  a        1,200  3e+06    75%",
        "                     bb",
        "1     /device:GPU:1  c            0  1e+06    25%",
    ]


def test_records_tell_what_each_cell_holds():
    items = [kl.Dense(3, name="a"), kl.ReLU(name="b"), kl.Dense(2, name="c")]
    model = tfgpipe.GPipe(
        [keras.Input((4,)), *items],
        layers_per_cell=[2, 1],
        devices=["CPU:4", "CPU:1"],
    )
    first, second = model.cells()
    assert (first.index, first.layers, first.num_params) == (0, ("a", "b"), 15)
    assert (second.index, second.layers, second.num_params) == (1, ("c",), 8)
    assert first.device.endswith("CPU:4")
    assert second.device.endswith("CPU:1")
    assert first.cost > second.cost > 0


def test_shared_weights_are_counted_in_their_first_cell():
    shared = kl.Dense(4, name="shared")
    model = tfgpipe.GPipe(
        [keras.Input((4,)), shared, kl.ReLU(), shared],
        2,
        layers_per_cell=[1, 2],
    )
    assert [cell.num_params for cell in model.cells()] == [20, 0]
    assert model.count_params() == 20


@pytest.mark.parametrize("built", [True, False])
def test_summary_shows_the_cell_of_each_layer(built):
    first = [keras.Input((4,))] if built else []
    items = [kl.Dense(3, name="one"), kl.Dense(2, name="two")]
    model = tfgpipe.GPipe([*first, *items], 2)
    lines = printed(lambda write: model.summary(print_fn=write))
    table = [line.split()[:3] for line in lines if "/device:CPU:" in line]
    assert table == (
        [["0", "/device:CPU:0", "one"], ["1", "/device:CPU:1", "two"]]
        if built
        else []
    )
    assert any("Total params" in line for line in lines)
