"""Points of the matrix: K, M, schedule and rule of recomputation."""

import keras
import numpy as np
from device_names import names

from tfgpipe.schedules.schedule import Schedule

REMAT = ("except_last", "always", "never", "mapping")
NAMED = ("gpipe", "1f1b", "interleaved", "zero_bubble")
SCHEDULES = (*NAMED, "written")
EARLY = SCHEDULES[1:]  # gradients start before all losses are there
# Losses that rows do not add up to need all outputs before any gradient.
WHOLE = {"hinge", "user_loss"}


def written(k, m):
    """A schedule that no name stands for.

    Two neighbouring cells a device. Micro-batches go in an odd order, each one
    through all cells before the next one starts, but one ahead of the
    gradients. Every second cell has its backward pass in halves, and the last
    recomputes as soon as it can.
    """
    micro_batches = [*range(1, m, 2), *range(0, m, 2)]
    order, waiting = [], []
    for i, b in enumerate(micro_batches):
        order += [("forward", c, b) for c in range(k)]
        for b in micro_batches[i - 1 : i] + micro_batches[i:] * (i == m - 1):
            order.append(("recompute", k - 1, b))
            for c in reversed(range(k)):
                if c % 2:
                    order.append(("input_gradient", c, b))
                    waiting.append(("weight_gradient", c, b))
                else:
                    order.append(("backward", c, b))
            order += waiting[: -k or None] if i < m - 1 else waiting
            waiting = waiting[-k:] if i < m - 1 else []
    devices = range(-(-k // 2))
    return Schedule([t for t in order if t[1] // 2 == d] for d in devices)


def arguments(k, m, schedule, remat):
    """The arguments of a `GPipe` for a point of the matrix."""
    found = {"num_partitions": k, "num_micro_batches": m, "remat": remat}
    if remat == "mapping":
        rules = ("never", "always", "except_last")
        found["remat"] = {i: rules[i % 3] for i in range(0, k, 2)}
    found["schedule"] = schedule
    if schedule in ("interleaved", "breadth_first"):
        count = k // 2 if k % 2 == 0 else 1
        found["devices"] = names(count)
    if k == 1:  # all layers in one cell
        found["remat_groups"] = 3
    if schedule == "written":
        found["schedule"] = written(k, m)
    return found


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, 0.9, clipnorm=0.2),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.SGD(
        0.01, 0.9, gradient_accumulation_steps=2
    ),
    "average": lambda: keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        clipvalue=0.05,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
}


def largest_difference(found, expected):
    """Largest difference, relative to the largest value of each tensor."""
    worst = 0.0
    for a, b in zip(
        keras.tree.flatten(found), keras.tree.flatten(expected), strict=True
    ):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        scale = max(np.abs(b).max(), 1e-3)
        worst = max(worst, np.abs(a - b).max() / scale)
    return worst
