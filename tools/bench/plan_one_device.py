"""Predicted steps of one device beside measured ones, for each M.

Nothing waits and nothing is sent, so what is wrong is what tasks are taken to
last. The device is one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.plans import Machine, Setting, predict
from tfgpipe.plans import sized as sized_model
from tfgpipe.sequence import source_of
from tools import devices
from tools.bench.models import MODELS, BenchModel
from tools.report import Column, Table, alternated, progress

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_COLUMNS = [
    Column("model", "model"),
    Column("m", "M"),
    Column("measured_ms", "measured ms", ".1f"),
    Column("predicted_ms", "predicted", ".1f"),
    Column("error", "error", "+.1%"),
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
    devices.split_cpu(1)
    machine = _machine()
    found = Table(
        "one_device",
        "Steps of one device, a core, as predicted from layers that were "
        "measured one by one, and as measured",
        _COLUMNS,
    )
    for name, model in progress(_MODELS.items(), "models"):
        expected = _predicted(model, machine, seconds)
        steps = [_step(model, m) for m in MICRO_BATCHES]
        for step in steps:
            step()  # traces
        for m, predicted, times in zip(
            MICRO_BATCHES, expected, alternated(steps, rounds, name)
        ):
            measured = statistics.median(times)
            found.rows.append(
                {
                    "model": name,
                    "m": m,
                    "measured_ms": 1e3 * measured,
                    "predicted_ms": 1e3 * predicted,
                    "error": predicted / measured - 1,
                }
            )
    errors = [abs(row["error"]) for row in found.rows]
    found.notes.append(
        f"Errors: median {statistics.median(errors):.1%}, worst "
        f"{max(errors):.1%}, of {len(errors)} settings"
    )
    return found


def _machine() -> Machine:
    """This core's memory; nothing is sent, and no FLOPs are asked for."""
    x = tf.Variable(tf.ones([2**26]))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x.assign_add(x)
        times.append(time.perf_counter() - start)
    return Machine(1.0, 1.0, 2 * 2**28 / min(times), 1.0, name="this core")


def _predicted(
    model: BenchModel, machine: Machine, seconds: float
) -> list[float]:
    """Seconds of a step for each number of micro-batches."""
    layers = [keras.Input(model.x_shape), *model.layers()]
    x, y = model.data(model.batch_size)
    sizes = sorted({max(1, model.batch_size // m) for m in MICRO_BATCHES})
    profile = tfgpipe.profile(
        layers,
        x,
        y,
        loss=model.loss,
        micro_batch_sizes=sizes,
        device="CPU:0",
        seconds=seconds,
        optimizer="sgd",
        verbose=0,
    )
    sized = sized_model(source_of(layers), None, "sgd")
    found = []
    for m in MICRO_BATCHES:
        workload = sized.by_profile(profile, model.batch_size / m)
        cut = (len(sized.sizes),)
        setting = Setting(1, 1, cut, m, "gpipe", ("never",))
        found.append(predict(workload, setting, machine).step_seconds)
    return found


def _step(model: BenchModel, m: int) -> Callable[[], float]:
    """A function that trains for a step, and returns its seconds."""
    pipeline = tfgpipe.GPipe(
        [keras.Input(model.x_shape), *model.layers()],
        num_partitions=1,
        num_micro_batches=m,
        devices=["CPU:0"],
        remat="never",
    )
    return model.step(pipeline)
