"""When each task of a training step runs, and what follows from that.

Updates of weights are left out of all that follows: no schedule has them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import inputs
from tfgpipe.checks import checked_counts
from tfgpipe.internals import Nest
from tfgpipe.run import Clock, Event
from tfgpipe.schedules import Op, Program, merged

__all__ = ["Event", "measure", "simulated"]


def simulated(program: Program, duration: Callable[[Op], float]) -> list[Event]:
    """Simulates a step whose operations take only their durations.

    Args:
        program: What runs.
        duration: Seconds that an operation takes.

    Returns:
        An event an operation, device by device.

    Example:

    >>> import tfgpipe
    >>> program = tfgpipe.Schedule("F0 F1 B1 B0").program()
    >>> events = simulated(
    ...     program, lambda op: 2 if op.kind == "backward" else 1
    ... )
    >>> [(event.start, event.end) for event in events]
    [(0, 1), (1, 2), (2, 4), (4, 6)]
    """
    times = program.simulate(duration)
    events = [
        Event(op.task, op.device, *t) for op, t in zip(program.ops, times)
    ]
    return sorted(events, key=lambda event: event.device)


def measure(
    model: Any,
    x: Nest,
    y: Nest,
    sample_weight: Nest = None,
    num_steps: int = 3,
) -> list[Event]:
    """Trains a few steps, and tells when each task of the last one ran.

    A clock is read before and after each task, on the host. A task starts when
    its device is free and what it takes from other devices has arrived. An
    accelerator's host is ahead of it, so there each reading waits for a number
    from the device: a step takes longer than one without a clock, by some tens
    of microseconds a task.

    Args:
        model: A compiled `GPipe`. It is trained.
        x: The inputs of one mini-batch.
        y: The labels.
        sample_weight: Weights of the rows, or None.
        num_steps: How many steps to train; the first is slower than others.

    Returns:
        An event a task, and one a device for its update, by their start.

    Raises:
        ValueError: If an argument is wrong.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import tfgpipe
    >>> layers = [
    ...     keras.Input((4,)),
    ...     keras.layers.Dense(4),
    ...     keras.layers.Dense(4),
    ... ]
    >>> model = tfgpipe.GPipe(layers, 1, num_micro_batches=2)
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((16, 4))
    >>> events = tfgpipe.timeline.measure(model, x, x)
    >>> sorted({event.task.kind for event in events})
    ['backward', 'forward', 'recompute', 'update']
    """
    (num_steps,) = checked_counts(num_steps=num_steps)
    model.compile_as_task()
    if not model.compiled:
        raise ValueError(
            "`model` must be compiled, for it is trained. Received: "
            f"'{model.name}', which is not."
        )
    data: tuple[Any, ...] = inputs.as_tensors(x, y)
    if sample_weight is not None:
        data = (*data, inputs.as_tensors(sample_weight, None)[0])
    model.build_for(data)
    clock = Clock()

    @tf.function(autograph=False)
    def step(data: Nest) -> tf.Tensor:
        with model.timed_by(clock):
            model.train_step(data)
        return tf.stack(clock.times)

    for _ in range(num_steps):
        times = step(data)
    return clock.events(times.numpy(), model.devices)


# -------------------------------------------------------- what follows from it
def scheduled(events: Sequence[Event]) -> list[Event]:
    """Returns the events of a schedule's tasks."""
    return [event for event in events if event.task.kind != "update"]


def length(events: Sequence[Event]) -> float:
    """Returns the seconds until the last task has ended."""
    return max(event.end for event in scheduled(events))


def idle_shares(events: Sequence[Event]) -> list[float]:
    """Returns the share of the length in which each device runs no task."""
    idle = [1.0] * (1 + max(event.device for event in events))
    total = length(events)
    for _, device, start, end in scheduled(events):
        idle[device] -= (end - start) / total
    return idle


def bubble(events: Sequence[Event]) -> float:
    """Returns the share of the length in which devices run no task."""
    return statistics.fmean(idle_shares(events))


def program_of(events: Sequence[Event]) -> Program:
    """Returns the program that the devices ran."""
    in_order = sorted(scheduled(events), key=lambda e: (e.start, e.end))
    device_of = {event.task: event.device for event in in_order}
    ops = [Op(*task, device_of[task]) for task in merged(device_of)]
    return Program(ops, len(idle_shares(events)))


def without_waiting(events: Sequence[Event]) -> list[Event]:
    """Returns when tasks would run, in their order, if they alone took time."""
    seconds = {event.task: event.end - event.start for event in events}
    return simulated(program_of(events), lambda op: seconds[op.task])


def places(events: Sequence[Event]) -> dict[int, int]:
    """Returns the place of each cell among the cells of its device, from 0."""
    cells: dict[int, set[int]] = {}
    for task, device, _, _ in scheduled(events):
        cells.setdefault(device, set()).add(task.cell)
    return {
        cell: place
        for of_device in cells.values()
        for place, cell in enumerate(sorted(of_device))
    }


def cell_seconds(
    events: Sequence[Event], numbers: Sequence[int]
) -> list[float]:
    """Returns how long the tasks of each cell take, over all replicas.

    `numbers` are the cells of the model of which the cells of tasks are parts.
    """
    seconds = [0.0] * (1 + max(numbers))
    for task, _, start, end in scheduled(events):
        seconds[numbers[task.cell]] += end - start
    return seconds


def summary(
    events: Sequence[Event], numbers: Sequence[int]
) -> dict[str, float]:
    """Returns what `callbacks.PipelineMonitor` tells of a step, by name.

    The arguments are as of `cell_seconds`.
    """
    idle = idle_shares(events)
    busiest = min(range(len(idle)), key=idle.__getitem__)
    seconds = cell_seconds(events, numbers)
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    mean = statistics.fmean(seconds)
    return {
        "bubble": bubble(events),
        "busiest_device": busiest,
        "busiest_share": 1 - idle[busiest],
        "slowest_cell": slowest,
        "slowest_ratio": seconds[slowest] / mean if mean else 1.0,
        "step_seconds": max(event.end for event in events),
    }


def seconds(value: float) -> str:
    """Returns a time with its unit, as a text.

    Example:

    >>> seconds(0.0123), seconds(1.234), seconds(81.2)
    ('12.3 ms', '1,234 ms', '81.2 s')
    """
    if value >= 10:
        return f"{value:,.1f} s"
    return f"{1000 * value:,.{0 if value >= 0.1 else 1}f} ms"
