"""Groups of layers that are computed again, where nobody asks for any."""

import collections

import keras
import pytest
from device_names import names
from keras import layers as kl

import tfgpipe


def wide(units=2048, count=8):
    """What it makes of a row is 16 times what crosses from block to block."""
    layers = [keras.Input((16, units // 16))]
    for _ in range(count):
        layers += [
            kl.Dense(units, "gelu"),
            kl.Dense(units, "relu"),
            kl.Dense(units // 16),
        ]
    return layers


def sizes(model):
    """How many steps the groups of each cell have."""
    found = collections.defaultdict(list)
    for cell in model.built_for("a test").cells:
        found[cell.number].append(len(cell.steps))
    return [*found.values()]


def pipeline(layers=None, k=2, m=4, **kwargs):
    return tfgpipe.GPipe(layers or wide(), k, m, **kwargs)


def test_groups_end_where_little_crosses():
    assert sizes(pipeline()) == [[3, 3, 3, 3]] * 2
    assert sizes(pipeline(k=4)) == [[3, 3]] * 4


def test_fewer_inputs_are_held_where_more_micro_batches_are():
    """With 32 of them, inputs of four groups are as much as a block makes."""
    assert sizes(pipeline(m=64)) == [[6, 6]] * 2
    assert sizes(pipeline(m=64, schedule="1f1b")) == [[3, 3, 3, 3]] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"remat": "never"},
        {"remat": 0.5},
        {"weights_on": "host", "devices": names(3)[1:]},
        {"remat_groups": 1},
    ],
)
def test_no_groups_where_they_save_nothing(arguments):
    assert sizes(pipeline(**arguments)) == [[12], [12]]


def test_each_cell_has_its_own():
    found = pipeline(remat={0: "never", 1: "always"})
    assert sizes(found) == [[12], [3, 3, 3, 3]]
    assert sizes(pipeline(wide(256))) == [[12], [12]]


def test_a_file_says_that_nobody_asked(tmp_path):
    pipeline().save(tmp_path / "model.keras")
    loaded = tfgpipe.load_model(tmp_path / "model.keras", num_partitions=4)
    assert sizes(loaded) == [[3, 3]] * 4
    assert loaded.get_config()["remat_groups"] is None
    one = tfgpipe.load_model(tmp_path / "model.keras", remat_groups=1)
    assert sizes(one) == [[12], [12]]
