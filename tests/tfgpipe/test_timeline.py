import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from simulated import events, seconds

import tfgpipe
from tfgpipe import timeline
from tfgpipe.schedules import Task
from tfgpipe.schedules.orders import CHUNKS, SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_measured_tasks_are_those_of_the_schedule_in_its_order(name):
    layers = [kl.Dense(4, "tanh") for _ in range(4)]
    devices = ["CPU:0", "CPU:1"]
    k = 2 * (CHUNKS[name] or 2)
    model = tfgpipe.GPipe(
        layers, k, 3, devices=devices, schedule=name, remat="always"
    )
    model.compile("sgd", "mse")
    ones = np.ones((6, 4), "float32")
    events = timeline.measure(model, ones, ones, num_steps=2)
    tasks = [event for event in events if event.task.kind != "update"]
    program = SCHEDULES[name](2, 3, k // 2).program("always")
    for device, own in enumerate(program.by_device):
        measured = [e for e in tasks if e.device == device]
        for before, after in itertools.pairwise(measured):
            assert before.start <= before.end <= after.start
        assert [e.task for e in measured] == [op.task for op in own]
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
        for needed in task.needs():
            if needed in at:
                assert at[needed].start < event.start
    assert model.optimizer.iterations.numpy() == 1


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_bytes_are_those_that_cells_take_from_each_other(schedule):
    layers = [
        keras.Input((3,), dtype="int32"),
        kl.Embedding(9, 4, mask_zero=True),
        kl.Dense(5),
        kl.Dense(2),
    ]
    model = tfgpipe.GPipe(layers, 3, 2, schedule=schedule)
    model.compile("sgd", "mse")
    clock = timeline.Clock()

    def step(data):
        with model.timed_by(clock):
            model.train_step(data)
        return clock.sent_bytes()

    x = np.ones((5, 3), "int32")
    data = tf.constant(x), tf.zeros((5, 3, 2))
    model.build_for(data)
    # Floats forward, and their gradients; the mask goes straight to the loss.
    expected = sum(5 * 3 * (4 * n + 4 * n) for n in (4, 5)) + 5 * 3
    assert tf.function(step, autograph=False)(data) == expected


def test_an_accelerator_is_waited_for():
    """For the host, an operation has ended when it is in the queue."""
    gpu, other = "/device:GPU:0", "/device:GPU:1"

    def step(x):
        with tf.device(other):
            awaited = x + 1.0
        clock = timeline.Clock()
        clock.start(gpu, [], [awaited, None])
        with tf.device(gpu):
            result = awaited * 2.0
        clock.stop(Task("forward", 1, 0), gpu, result.op)
        for time, op in zip(clock.times, (awaited.op, result.op)):
            (fetched,) = (
                before
                for before in time.op.control_inputs
                if before.type == "Identity"
            )
            (number,) = fetched.inputs
            assert fetched.device == time.op.device == "/device:CPU:0"
            assert number.op.device == gpu
            flat = number.op.inputs[0].op  # of which it is a slice
            assert op in [*flat.control_inputs, *(t.op for t in flat.inputs)]
        return clock.sent_bytes()

    function = tf.function(step, autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec((5, 2))).graph
    assert tf.get_static_value(graph.outputs[0]) in (None, 40)


# -------------------------------------------------------- what follows from it
def test_numbers_are_those_of_the_schedule():
    made = events(k=4, m=8)
    program = timeline.program_of(made)
    assert timeline.simulated(program, seconds) == made
    assert timeline.length(made) == program.length(seconds)
    assert timeline.bubble(made) == pytest.approx(program.bubble(seconds))
    assert timeline.idle_shares(made) == pytest.approx([9 / 40] * 4)


def test_updates_are_in_no_number():
    for function in (
        timeline.length,
        timeline.bubble,
        timeline.idle_shares,
        lambda made: timeline.program_of(made).ops,
    ):
        assert function(events(updates=True)) == function(events())
