"""Where layers are, and what the schedule allows."""

import keras
import pytest
from ideal import IDEALS

import tfgpipe
from tfgpipe.monitor import ideal_bubble, ideal_bubbles, layout_of
from tfgpipe.schedules import CHUNKS, SCHEDULES

DEVICES = ["CPU:0", "CPU:1"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ideal_bubble_is_that_of_the_schedule(schedule):
    layers = [keras.layers.Dense(2) for _ in range(4)]
    chunks = CHUNKS[schedule] or 2
    model = tfgpipe.GPipe(
        [keras.Input((2,)), *layers],
        num_partitions=2 * chunks,
        num_micro_batches=4,
        devices=["CPU:0", "CPU:1"],
        schedule=schedule,
    )
    found = ideal_bubble(model)
    assert found == pytest.approx(IDEALS[schedule](2, 4, chunks).bubble)
    made = SCHEDULES[schedule](2, 4, chunks)
    own = tfgpipe.GPipe(
        [keras.Input((2,)), *[keras.layers.Dense(2) for _ in range(4)]],
        num_partitions=2 * chunks,
        num_micro_batches=4,
        devices=["CPU:0", "CPU:1"],
        schedule=made,
    )
    assert ideal_bubble(own) == pytest.approx(found)
    assert ideal_bubbles(model)(8) < ideal_bubbles(model)(4) == found
    assert ideal_bubbles(own) is None  # of one number of micro-batches
    if schedule in ("gpipe", "1f1b"):
        assert found == pytest.approx(1 / 5)
    else:
        assert found < 1 / 5


def test_layout_has_each_layer_with_its_cost_and_its_device():
    layers = [keras.layers.Dense(2, name=name) for name in "abcdefgh"]
    model = tfgpipe.GPipe(
        [keras.Input((2,)), *[(la, i + 1) for i, la in enumerate(layers)]],
        num_partitions=4,
        devices=DEVICES,
        schedule="interleaved",
        layers_per_cell=[2, 2, 2, 2],
        remat_groups=2,
    )
    found = layout_of(model)
    assert found.layers == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    assert found.costs == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert found.devices == [0, 1, 0, 1]
    assert found.numbers == [0, 0, 1, 1, 2, 2, 3, 3]
