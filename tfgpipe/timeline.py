"""When each task of a training step runs, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgpipe.checks import checked_counts
from tfgpipe.run import Clock, Event
from tfgpipe.schedules import Op, Program
from tfgpipe.sequence import inputs

__all__ = ["Clock", "Event", "measure", "simulated"]


def simulated(program: Program, duration: Callable[[Op], float]) -> list[Event]:
    """What a step would be if operations took only their own time.

    Args:
        program: What runs.
        duration: Seconds that an operation takes.

    Returns:
        An event an operation, device by device.
    """
    times = program.simulate(duration)
    events = [
        Event(op.task, op.device, *t) for op, t in zip(program.ops, times)
    ]
    return sorted(events, key=lambda event: event.device)


def measure(
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any = None,
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
    """
    (num_steps,) = checked_counts(num_steps=num_steps)
    if not hasattr(model, "timed_by"):
        raise ValueError(
            f"`model` must be a `tfgpipe.GPipe`. Received: model={model!r}."
        )
    model.compile_as_task()
    if not model.compiled:
        raise ValueError(
            "`model` must be compiled, for it is trained. Received: "
            f"'{model.name}', which is not. Call `model.compile(optimizer, "
            "loss)` first."
        )
    data: tuple[Any, ...] = inputs.as_tensors(x, y)
    if sample_weight is not None:
        data = (*data, inputs.as_tensors(sample_weight, None)[0])
    model.build_for(data)
    clock = Clock()

    @tf.function(autograph=False)
    def step(data: Any) -> tf.Tensor:
        with model.timed_by(clock):
            model.train_step(data)
        return tf.stack(clock.times)

    for _ in range(num_steps):
        times = step(data)
    return clock.events(times.numpy(), model.devices)
