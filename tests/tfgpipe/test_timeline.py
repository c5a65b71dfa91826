import itertools

import numpy as np
import pytest
from keras import layers as kl

import tfgpipe
from tfgpipe import timeline
from tfgpipe.schedules.named import SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_measured_tasks_are_those_of_the_schedule_in_its_order(name):
    layers = [kl.Dense(4, "tanh") for _ in range(4)]
    devices = ["CPU:0", "CPU:1"]
    k = 4 if name == "interleaved" else 2
    model = tfgpipe.GPipe(
        layers, k, 3, devices=devices, schedule=name, remat="always"
    )
    model.compile("sgd", "mse")
    ones = np.ones((6, 4), "float32")
    events = timeline.measure(model, ones, ones, num_steps=2)
    tasks = [event for event in events if event.task.kind != "update"]
    schedule = SCHEDULES[name](2, 3, k // 2).with_recompute(lambda k, m: False)
    for device, own in enumerate(schedule.tasks):
        measured = [e for e in tasks if e.device == device]
        for before, after in itertools.pairwise(measured):
            assert before.start <= before.end <= after.start
        # nothing waits for the input gradient of the first cell
        expected = [task for task in own if task.cell > 0]
        assert [e.task for e in measured if e.task.cell > 0] == expected
    updates = [event for event in events if event.task.kind == "update"]
    assert sorted(event.device for event in updates) == [0, 1]
    assert min(event.start for event in events) == 0.0


def test_a_task_starts_after_those_that_it_needs():
    model = tfgpipe.GPipe([kl.Dense(4), kl.Dense(4)], 2, 2)
    model.compile("sgd", "mse")
    ones = np.ones((4, 4), "float32")
    weights = np.ones(4, "float32")
    events = timeline.measure(model, ones, ones, weights, num_steps=1)
    at = {event.task: event for event in events}
    for task, event in at.items():
        for needed in task.needs(2):
            if needed in at:
                assert at[needed].start < event.start
    assert model.optimizer.iterations.numpy() == 1
