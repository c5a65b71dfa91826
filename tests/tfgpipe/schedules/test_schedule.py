import pytest

from tfgpipe.schedules.orders import CHUNKS, SCHEDULES
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import SCHEDULED, Task

CASES = [(k, m) for k in (1, 2, 3, 8) for m in (1, 2, 5, 32)]
F, R, B, X, W = SCHEDULED  # X: input_gradient
ONE_EACH = [(F, 0, 0), (B, 0, 0)]


def forward_only(k, m):
    """For evaluation alone."""
    return Schedule([Task("forward", i, j) for j in range(m)] for i in range(k))


# ----------------------------------------------------------------- the order
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_order_has_every_task_once_after_what_it_needs(name, chunks):
    for devices, m in CASES:
        schedule = SCHEDULES[name](devices, m, CHUNKS[name] or chunks)
        order = schedule.order()
        assert sorted(order) == sorted(t for own in schedule.tasks for t in own)
        position = {task: i for i, task in enumerate(order)}
        for own in schedule.tasks:
            assert [position[t] for t in own] == sorted(
                position[t] for t in own
            )
        for task in order:
            needs = [position[t] for t in task.needs() if t in position]
            assert all(place < position[task] for place in needs)


def test_schedules_of_the_same_tasks_are_equal():
    one = Schedule([ONE_EACH])
    assert one == Schedule(([*ONE_EACH],)) == Schedule(one.tasks)
    assert len({one, Schedule([ONE_EACH])}) == 1
    assert one != forward_only(1, 1)
    assert one != one.tasks
    assert "num_cells=1" in repr(one)


# ------------------------------------------------------------- the simulation
def test_simulation_starts_tasks_as_early_as_device_and_needs_allow():
    schedule = Schedule(
        [
            [(F, 0, 0), (F, 0, 1), (R, 0, 0), (B, 0, 0), (B, 0, 1)],
            [(F, 1, 0), (B, 1, 0), (F, 1, 1), (B, 1, 1)],
        ]
    )
    duration = {F: 1, R: 1, B: 4}
    times = schedule.simulate(lambda task: duration[task.kind] + task.cell)
    assert times == {
        (F, 0, 0): (0, 1),
        (F, 0, 1): (1, 2),
        (R, 0, 0): (2, 3),  # while the gradient is awaited
        (F, 1, 0): (1, 3),
        (B, 1, 0): (3, 8),
        (B, 0, 0): (8, 12),
        (F, 1, 1): (8, 10),
        (B, 1, 1): (10, 15),
        (B, 0, 1): (15, 19),
    }
    length = schedule.length(lambda task: duration[task.kind] + task.cell)
    assert length == 19
    bubble_of = schedule.bubble(lambda task: duration[task.kind] + task.cell)
    assert bubble_of == pytest.approx(1 - (11 + 14) / (2 * 19))


def test_transfers_take_time_between_devices_alone():
    schedule = Schedule(
        [
            [(F, 0, 0), (F, 1, 0), (B, 1, 0), (B, 0, 0)],
            [(F, 2, 0), (B, 2, 0)],
        ]
    )
    times = schedule.simulate(lambda task: 1, link=0.5)
    assert times == {
        (F, 0, 0): (0, 1),
        (F, 1, 0): (1, 2),
        (F, 2, 0): (2.5, 3.5),
        (B, 2, 0): (3.5, 4.5),
        (B, 1, 0): (5, 6),
        (B, 0, 0): (6, 7),
    }
    assert schedule.length(lambda task: 1, link=0.5) == 7
    assert schedule.bubble(lambda task: 1, link=0.5) == 1 - 6 / (2 * 7)
    for bad in (-1, float("nan"), None):
        with pytest.raises(ValueError, match="Received: link="):
            schedule.length(lambda task: 1, link=bad)


def test_weight_gradient_is_what_frees_a_micro_batch():
    late = Schedule([[(F, 0, 0), (X, 0, 0), (F, 0, 1), (W, 0, 0), (B, 0, 1)]])
    soon = Schedule([[(F, 0, 0), (X, 0, 0), (W, 0, 0), (F, 0, 1), (B, 0, 1)]])
    assert (late.held(), soon.held()) == ([2], [1])
    assert forward_only(1, 3).held() == [0]


# ------------------------------------------------------------------ the checks
INCOMPLETE = "a forward and, to train, a backward, or an input_gradient and"
REFUSED = {
    "not_lists": (5, ["one list of tasks a device", "tasks=5"]),
    "nothing": ([], ["one list of tasks a device", r"tasks=\[\]"]),
    "empty_device": ([ONE_EACH, []], ["none of them empty"]),
    "flat": (
        [Task(*task) for task in ONE_EACH],
        ["one list of tasks a device"],
    ),
    "pair": ([[(F, 0, 0), (B, 0)]], [r"none of them empty"]),
    "kind": ([[(F, 0, 0), ("update", 0, 0)]], ["of the kinds", "'update', 0"]),
    "unhashable_kind": ([[([], 0, 0)]], ["of the kinds", r"\(\[\], 0, 0\)"]),
    "negative": ([[(F, 0, -1)]], ["integers from 0", r"'forward', 0, -1"]),
    "float": ([[(F, 0.0, 0)]], ["integers from 0", r"'forward', 0.0, 0"]),
    "bool": ([[(F, False, 0)]], ["integers from 0", "'forward', False, 0"]),
    "twice": (
        [[(F, 0, 0), (F, 0, 0), (B, 0, 0)]],
        [
            "every task once",
            r"forward\(cell=0, micro_batch=0\) at position 0 of device 0, and "
            r"forward\(cell=0, micro_batch=0\) at position 1 of device 0",
        ],
    ),
    "cell_on_two_devices": (
        [[(F, 0, 0)], [(F, 1, 0), (B, 0, 0), (B, 1, 0)]],
        [
            "all tasks of a cell on one device",
            r"backward\(cell=0, micro_batch=0\) at position 1 of device 1",
        ],
    ),
    "no_such_cell": (
        [[(F, 0, 0)], [(F, 2, 0)]],
        [INCOMPLETE, "nothing for micro-batch 0 in cell 1"],
    ),
    "no_such_micro_batch": (
        [[(F, 0, 0), (F, 0, 10**12)]],
        ["nothing for micro-batch 1 in cell 0"],
    ),
    "backward_missing": (
        [[(F, 0, 0), (F, 0, 1), (B, 0, 0)]],
        [INCOMPLETE, "Received: forward for micro-batch 1 in cell 0"],
    ),
    "forward_missing": ([[(B, 0, 0)]], ["Received: backward for micro-batch"]),
    "recomputed_for_nothing": (
        [[(F, 0, 0), (R, 0, 0)]],
        ["Received: forward, recompute for micro-batch 0"],
    ),
    "weight_gradient_missing": (
        [[(F, 0, 0), (X, 0, 0)]],
        ["Received: forward, input_gradient for micro-batch 0"],
    ),
    "input_gradient_missing": (
        [[(F, 0, 0), (W, 0, 0)]],
        ["Received: forward, weight_gradient for micro-batch 0"],
    ),
    "both_forms": (
        [[(F, 0, 0), (B, 0, 0), (X, 0, 0), (W, 0, 0)]],
        ["Received: forward, backward, input_gradient, weight_gradient for"],
    ),
    "too_early": (
        [[(F, 0, 0), (B, 0, 1), (F, 0, 1), (B, 0, 0)]],
        [
            "wait for ever",
            r"backward\(cell=0, micro_batch=1\) at position 1 of device 0 "
            r"waits for forward\(cell=0, micro_batch=1\) at position 2",
        ],
    ),
    "recompute_too_late": (
        [[(F, 0, 0), (B, 0, 0), (R, 0, 0)]],
        [r"backward.* at position 1 of device 0 waits for recompute"],
    ),
    "weight_gradient_too_early": (
        [[(F, 0, 0), (W, 0, 0), (X, 0, 0)]],
        [r"weight_gradient.* position 1 .* waits for input_gradient"],
    ),
    "cells_of_a_device_too_early": (
        [[(F, 1, 0), (F, 0, 0)]],
        [r"forward\(cell=1, .* waits for forward\(cell=0"],
    ),
    "deadlock": (
        [
            [(F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1)],
            [(F, 1, 0), (F, 1, 1), (B, 1, 0), (B, 1, 1)],
        ],
        [
            "wait for ever",
            r"Received: backward\(cell=0, micro_batch=0\) at position 1 of "
            r"device 0 waits for backward\(cell=1, micro_batch=0\) at position "
            r"2 of device 1; forward\(cell=1, micro_batch=1\) at position 1 of "
            r"device 1 waits for forward\(cell=0, micro_batch=1\) at position "
            r"2 of device 0\.",
        ],
    ),
    "deadlock_of_others": (  # device 0 waits, but nothing waits for it
        [
            [(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)],
            [(F, 1, 0), (B, 1, 0), (F, 1, 1), (B, 1, 1)],
            [(F, 2, 0), (F, 2, 1), (B, 2, 0), (B, 2, 1)],
        ],
        [
            r"Received: backward\(cell=1, micro_batch=0\) at position 1 of "
            "device 1 waits"
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schedule_refuses(name):
    tasks, messages = REFUSED[name]
    with pytest.raises(ValueError, match="`tasks` must") as error:
        Schedule(tasks)
    for message in messages:
        assert error.match(message)


def test_tuples_and_lists_become_tasks():
    own = [list(task) for task in ONE_EACH]
    schedule = Schedule([own])
    assert schedule == Schedule([ONE_EACH])
    assert all(isinstance(t, Task) for t in schedule.tasks[0])
    assert str(schedule.tasks[0][0]) == "forward(cell=0, micro_batch=0)"
