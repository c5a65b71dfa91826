"""Predicted steps of one device beside measured ones, for each M.

Nothing waits and nothing is sent, so what is wrong is what tasks are taken to
last. The device is one core.
"""

from __future__ import annotations

import statistics
import time

import tensorflow as tf
from keras import layers as kl

from tfgpipe.devices import local
from tfgpipe.plans import Machine
from tools.bench.models import MODELS, BenchModel
from tools.bench.plan_steps import (
    compared,
    compared_columns,
    made_step,
    measure_alone,
    with_errors,
)
from tools.report import Column, Table, alternated, progress

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_COLUMNS = [
    Column("model", "model"),
    Column("m", "M"),
    *compared_columns("ms"),
]


def _embedding() -> list[kl.Layer]:
    # The data are standard normal numbers: ids around 10,000.
    return [
        kl.Rescaling(1000.0, 10_000.0),
        kl.Embedding(20_000, 256),
        kl.Dense(512, "relu"),
        kl.Dense(128),
    ]


_MODELS = {
    name: MODELS[name] for name in ("dense", "convolutions", "transformer")
} | {
    "embedding": BenchModel(
        "an embedding of 20,000 words in 256 units, and two dense layers",
        _embedding,
        (32,),
        (32, 128),
        "mse",
        128,
    )
}


def table(rounds: int, seconds: float) -> Table:
    """Profiles each model, and trains it with each number of micro-batches.

    Args:
        rounds: Steps of a setting; the median counts.
        seconds: For which a model's layers are measured.
    """
    local.split_cpu(1)
    machine = _machine()
    found = Table(
        "one_device",
        "Steps of one device, a core, as predicted from layers that were "
        "measured one by one, and as measured",
        _COLUMNS,
    )
    for name, model in progress(_MODELS.items(), "models"):
        own = measure_alone(name, model, seconds, MICRO_BATCHES)
        settings = [
            own.setting("gpipe", "never", 1, 1, m) for m in MICRO_BATCHES
        ]
        steps = [made_step(model, setting) for setting in settings]
        for step in steps:
            step()  # traces
        for setting, times in zip(settings, alternated(steps, rounds, name)):
            measured = 1e3 * statistics.median(times)
            predicted = 1e3 * own.predicted(setting, machine)
            found.rows.append(
                {
                    "model": name,
                    "m": setting.num_micro_batches,
                    **compared("ms", measured, predicted),
                }
            )
    return with_errors(found, "settings")


def _machine() -> Machine:
    """This core's memory; nothing is sent, and no FLOPs are asked for."""
    x = tf.Variable(tf.ones([2**26]))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x.assign_add(x)
        times.append(time.perf_counter() - start)
    return Machine(1.0, 1.0, 2 * 2**28 / min(times), 1.0, name="this core")
