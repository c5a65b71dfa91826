"""What the pipeline costs beside the work: one cell, and dispatch.

step: one cell and one micro-batch, nothing recomputed, beside plain Keras: the
same layers in a `keras.Sequential`, trained on the same data the way `fit`
does, steps of both in turns; `ratio` is that of neighbouring steps.

dispatch: the slope of the step time with the number of tasks, for layers that
compute next to nothing; beside it, that of calls of an empty function.

"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfgpipe
from tfgpipe.schedules import SCHEDULES
from tools.bench.models import MODELS, train_step
from tools.flags import define, new_flags
from tools.report import (
    Report,
    Table,
    alternated,
    columns,
    median_of,
    spread,
    spread_values,
)

BESIDE = ["transformer", "convolutions"]  # models of part step
DISPATCH_K, DISPATCH_M = 4, [8, 16, 32, 64]

FLAGS = new_flags(rounds=15)
define(
    FLAGS,
    part=(
        ["step", "dispatch"],
        "What to measure.",
        ["step", "dispatch"],
    ),
)

STEP_COLUMNS = columns(
    "model | *keras_ms: Keras ms: .1f | *gpipe_ms: GPipe ms: .1f | "
    "*ratio: ratio: .3f | keras_first_step_s: Keras first step s: .2f | "
    "gpipe_first_step_s: GPipe first step s: .2f"
)
DISPATCH_COLUMNS = columns(
    "what | k: K | fewest | most | us: us each: .0f | "
    "correlation: correlation: .3f"
)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    parts = {"step": _steps, "dispatch": _dispatch}
    make_devices()
    _warm_up()
    for part in dict.fromkeys(values.part):
        parts[part](values, report)


def make_devices() -> None:
    """Splits the CPU; operations have all cores, as in plain Keras."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DISPATCH_K
    )


def _warm_up() -> None:
    """Pays for what the first model of a process pays for."""
    for make in (keras.Sequential, pipeline):
        model = make([keras.layers.Dense(1)])
        step_of(model, np.ones((2, 1), np.float32))()


# ------------------------------------------------------ beside plain Keras
def _steps(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "step",
            f"One cell beside plain Keras: median and quartiles of "
            f"{values.rounds} steps",
            STEP_COLUMNS,
        )
    )
    for name in BESIDE:
        what = MODELS[name]
        table.notes.append(f"{name}: {what.description}")
        models = [keras.Sequential(what.layers()), pipeline(what.layers())]
        for model in models:
            model.build((None, *what.x_shape))
        steps = [what.step(model) for model in models]
        first = [step() for step in steps]
        alternated(steps, 2, f"{name}, first steps")
        times = alternated(steps, values.rounds, name)
        ratios = [after / before for before, after in zip(*times)]
        table.rows.append(
            {
                "model": name,
                **spread_values("keras_ms", spread(times[0]).times(1000)),
                **spread_values("gpipe_ms", spread(times[1]).times(1000)),
                **spread_values("ratio", spread(ratios)),
                "keras_first_step_s": first[0],
                "gpipe_first_step_s": first[1],
            }
        )


# ------------------------------------------------------------------ dispatch
def _dispatch(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "dispatch",
            f"Dispatch: slope of the median of {values.rounds} steps",
            DISPATCH_COLUMNS,
        )
    )
    slope = task_slope(values.rounds)
    row = {"what": "tasks of gpipe", "k": DISPATCH_K}
    table.rows.append(row | slope._asdict())
    slope = call_slope(values.rounds)
    table.rows.append({"what": "empty function calls"} | slope._asdict())


class Slope(NamedTuple):
    """How the duration of a step grows with what it does.

    Attributes:
        fewest: Fewest tasks or calls in a step.
        most: Most of them.
        us: Microseconds for one more.
        correlation: How well a line fits, up to 1.
    """

    fewest: int
    most: int
    us: float
    correlation: float


def pipeline(layers: list[Any], k: int = 1, m: int = 1) -> keras.Model:
    """A pipeline that recomputes nothing."""
    return tfgpipe.GPipe(
        layers,
        num_partitions=k,
        num_micro_batches=m,
        devices=[f"CPU:{index}" for index in range(k)],
        remat="never",
    )


def step_of(model: keras.Model, x: np.ndarray) -> Callable[[], float]:
    """A step in which a model learns to return what it gets."""
    model.build(x.shape)
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    return train_step(model, x, x)


def task_slope(rounds: int) -> Slope:
    """Of the tasks of a pipeline whose layers compute next to nothing."""
    points = []
    for m in DISPATCH_M:
        layers = [keras.layers.Dense(1) for _ in range(DISPATCH_K)]
        model = pipeline(layers, DISPATCH_K, m)
        step = step_of(model, np.ones((m, 1), np.float32))
        num_tasks = len(SCHEDULES["gpipe"](DISPATCH_K, m).order())
        points.append((num_tasks, median_of(step, rounds)))
    return _slope(points)


def call_slope(rounds: int) -> Slope:
    """Of calls of an empty function, in a graph."""
    return _slope(
        [(n, median_of(_calls(n), rounds)) for n in (50, 100, 200, 400)]
    )


def _calls(num_calls: int) -> Callable[[], float]:
    """A step that calls a function, one call after the other."""

    @tf.function(experimental_attributes={"_noinline": True})
    def empty(x: tf.Tensor) -> tf.Tensor:
        return tf.identity(x)

    @tf.function
    def chain(x: tf.Tensor) -> tf.Tensor:
        for _ in range(num_calls):
            x = empty(x)
        return x

    x = tf.zeros((1, 1))

    def step() -> float:
        start = time.perf_counter()
        chain(x).numpy()
        return time.perf_counter() - start

    return step


def _slope(points: Sequence[tuple[int, float]]) -> Slope:
    counts, seconds = zip(*points)
    slope, _ = statistics.linear_regression(counts, seconds)
    correlation = statistics.correlation(counts, seconds)
    return Slope(min(counts), max(counts), 1e6 * slope, correlation)
