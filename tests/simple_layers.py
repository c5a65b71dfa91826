"""Layers that are only numbers."""

import random

from tfgpipe.costs import Activation, Bytes, LayerSize, StepMemory
from tfgpipe.plans.workload import Workload
from tfgpipe.profiles import MEASURED


def size(weights=0, live=8, kept=16, others=0, name="layer", crossing=4):
    return LayerSize(
        name=name,
        num_params=weights,
        num_values=weights,
        weight_bytes=4 * weights,
        slot_bytes=8 * weights,
        gradient_bytes=4 * weights,
        flops=1.0,
        live_bytes=live,
        memory=StepMemory(
            inputs=(Activation(0, Bytes(0, live)),),
            made=(
                Activation(0, Bytes(0, kept)),
                Activation(1, Bytes(0, live)),
            ),
            crossing=Bytes(0, crossing),
            sparse=Bytes(0, 0),
            forward=Bytes(0, others),
            backward=Bytes(0, others),
            reaches=1,
        ),
    )


def workload(seconds, rows=1.0, task_seconds=0.0, **of_size):
    """Layers with weights, that take `seconds` forward and twice backward."""
    sizes = [size(1, **of_size) for _ in seconds]
    times = [equal_tasks(s) for s in seconds]
    return Workload(sizes, 8, times, task_seconds, rows)


def equal_tasks(seconds):
    """Each of the tasks takes so long; the whole backward pass twice."""
    whole = 2 * seconds
    found = [seconds] * 3 + [whole, seconds, seconds, whole]
    return dict(zip(MEASURED, found))


def random_seconds(count, seed):
    rng = random.Random(seed)
    return [rng.choice([1, 1, 2, 3, 5]) for _ in range(count)]
