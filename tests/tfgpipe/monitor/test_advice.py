"""What is said of steps that are made up."""

import keras
import pytest
from ideal import IDEALS

import tfgpipe
from tfgpipe import timeline
from tfgpipe.monitor import (
    Layout,
    advise,
    ideal_bubble,
    layout_of,
)
from tfgpipe.schedules import CHUNKS, SCHEDULES, CellFacts, Remat, lower
from tfgpipe.timeline import simulated


def layout(*costs, devices=None, groups=1):
    """Cells of layers named by cell and place: '1b' is second in cell 1."""
    return Layout(
        [
            [f"{k}{'abcdefg'[i]}" for i in range(len(c))]
            for k, c in enumerate(costs)
        ],
        [list(c) for c in costs],
        devices or list(range(len(costs))),
        [k for k in range(len(costs)) for _ in range(groups)],
    )


def advice(seconds, cells, m=16, most=16, name="gpipe", ideal=True):
    """What is said where a forward task of each cell takes so many seconds."""
    devices = 1 + max(cells.devices)
    chunks = len(seconds) // devices
    schedule = SCHEDULES[name](devices, m, chunks)
    groups = cells.numbers.count(0)
    count = len(cells.numbers)
    program = lower(
        lambda _: schedule,
        [CellFacts()] * count,
        Remat(["never"] * count, [groups] * len(seconds)),
        [m],
    )

    def duration(task):
        own = seconds[cells.numbers[task.cell]] / groups
        return own if task.kind == "forward" else 2 * own

    def bubble(count):
        return IDEALS[name](devices, count, chunks).bubble

    events = simulated(program, duration)
    made = timeline.cell_seconds(events, cells.numbers)
    assert made == pytest.approx([3 * m * s for s in seconds])
    return advise(events, cells, m, most, bubble if ideal else lambda m: 0.4)


def test_layer_moves_from_the_slowest_cell_to_its_quicker_neighbour():
    cells = layout([1, 1], [1, 1], [1, 3, 1], [1])
    assert advice([1.0, 1.2, 2.0, 0.8], cells) == (
        "cell 2 takes 1.60 times the mean: move layer '2c' to cell 3 "
        "(layers_per_cell=[2, 2, 2, 2]), and the slowest would take about 1.28 "
        "times the mean"
    )


def test_layers_of_measured_cells_share_their_seconds_by_cost():
    # 4 seconds: 1 and 3, whatever the unit of the costs
    assert advice([1.0, 4.0], layout([50], [100, 300])).startswith(
        "cell 1 takes 1.60 times the mean: move layer '1a' to cell 0"
    )
    # without costs, all alike
    assert advice([1.0, 4.0], layout([0], [0, 0])).startswith(
        "cell 1 takes 1.60 times the mean: move layer '1a' to cell 0 "
        "(layers_per_cell=[2, 1]), and the slowest would take about 1.20"
    )


@pytest.mark.parametrize(
    ("seconds", "cells"),
    [
        ([1.0, 3.0], layout([1], [1])),  # a cell has a layer
        ([2.0, 4.0], layout([1, 1], [1, 1], groups=2)),  # or one a group
        ([2.0, 3.0], layout([1], [1, 1])),  # the other would be slower
        ([1.0, 3.0], layout([1], [2, 98])),  # or too little is won
    ],
)
def test_no_move_is_told_where_none_helps(seconds, cells):
    assert advice(seconds, cells).startswith(
        "no move of layers would help: cell 1 takes "
        f"{seconds[1] / sum(seconds) * 2:.2f} times the mean"
    )


def test_few_micro_batches_are_told_with_what_more_would_give():
    cells = layout([1], [1], [1], [1])
    assert advice([1.0] * 4, cells, m=4, most=64) == (
        "bubble 43%, ideal at M = 4: 43%: more micro-batches would help, "
        "num_micro_batches=16 has an ideal of 16%"
    )
    # there cannot be more than rows
    assert "num_micro_batches=6 has" in advice([1.0] * 4, cells, m=4, most=6)
    assert advice([1.0] * 4, cells, m=4, most=4).startswith("balanced")
    # a schedule of the user's has one M
    found = advice([1.0] * 4, cells, m=4, most=64, ideal=False)
    assert found.startswith("balanced")


def spread_out(pause):
    """Balanced tasks of 1 ms, with pauses between them."""

    def duration(task):
        return 0.001 if task.kind == "forward" else 0.002

    events = simulated(SCHEDULES["gpipe"](2, 16, 1).program(), duration)
    return [
        event._replace(
            start=event.start * (1 + pause),
            end=event.start * (1 + pause) + event.end - event.start,
        )
        for event in events
    ]


def test_devices_that_wait_between_tasks_are_the_reason():
    cells = layout([1], [1])
    events = spread_out(2.0)
    found = advise(events, cells, 16, 64, lambda m: 1 / (m + 1))
    assert found == (
        "bubble 68%: devices wait between tasks, which take 1.5 ms "
        "on average; without that it would be 6%. Larger micro-batches would "
        "help: more rows in a mini-batch, or fewer micro-batches"
    )
    # no more micro-batches, which would be smaller still
    found = advise(events, cells, 16, 64, lambda m: 0.2 if m == 16 else 0.1)
    assert "Larger micro-batches would help" in found
    found = advise(spread_out(0.05), cells, 16, 64, lambda m: 1 / (m + 1))
    assert found.startswith("balanced")


def test_balanced_cells_are_said_to_be_so():
    assert advice([1.0, 1.05], layout([1], [1])) == (
        "balanced: cell 1 takes 1.02 times the mean, and is the slowest; "
        "bubble 8%"
    )


# -------------------------------------------------------------------- layouts
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
    assert ideal_bubble(model, 8) < ideal_bubble(model, 4) == found
    if schedule in ("gpipe", "1f1b"):
        assert found == pytest.approx(1 / 5)
    else:
        assert found < 1 / 5


def test_layout_has_each_layer_with_its_cost_and_its_device():
    layers = [keras.layers.Dense(2, name=name) for name in "abcdefgh"]
    model = tfgpipe.GPipe(
        [keras.Input((2,)), *[(la, i + 1) for i, la in enumerate(layers)]],
        num_partitions=4,
        devices=["CPU:0", "CPU:1"],
        schedule="interleaved",
        layers_per_cell=[2, 2, 2, 2],
        remat_groups=2,
    )
    found = layout_of(model)
    assert found.layers == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    assert found.costs == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert found.devices == [0, 1, 0, 1]
    assert found.numbers == [0, 0, 1, 1, 2, 2, 3, 3]
