"""What it costs to dispatch a task, or to call a function."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe.schedules import SCHEDULES
from tools.bench.models import train_step
from tools.report import median_of


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


def pipeline(
    layers: list[Any], k: int = 1, m: int = 1, schedule: str = "gpipe"
) -> keras.Model:
    """A pipeline that recomputes nothing.

    Args:
        layers: Its layers.
        k: Cells.
        m: Micro-batches.
        schedule: As in `tfgpipe.GPipe`.
    """
    return tfgpipe.GPipe(
        layers,
        num_partitions=k,
        num_micro_batches=m,
        devices=[f"CPU:{index}" for index in range(k)],
        schedule=schedule,
        remat="never",
    )


def step_of(model: keras.Model, x: np.ndarray) -> Callable[[], float]:
    """A step in which a model learns to return what it gets."""
    model.build(x.shape)
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    return train_step(model, x, x)


def task_slope(
    schedule: str, k: int, micro_batches: Sequence[int], rounds: int
) -> Slope:
    """Of the tasks of a pipeline whose layers compute next to nothing.

    Args:
        schedule: As in `tfgpipe.GPipe`.
        k: Cells.
        micro_batches: Numbers of micro-batches, at least two.
        rounds: Steps to take the median of.
    """
    points = []
    for m in micro_batches:
        layers = [keras.layers.Dense(1) for _ in range(k)]
        model = pipeline(layers, k, m, schedule)
        step = step_of(model, np.ones((m, 1), np.float32))
        num_tasks = len(SCHEDULES[schedule](k, m).order())
        points.append((num_tasks, median_of(step, rounds)))
    return _slope(points)


def call_slope(rounds: int) -> Slope:
    """Of calls of an empty function, in a graph.

    Args:
        rounds: Steps to take the median of.
    """
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
