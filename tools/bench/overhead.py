"""What the pipeline costs beside the work: one cell, dispatch, tracing.

step: one cell and one micro-batch, nothing recomputed, beside plain Keras: the
same layers in a `keras.Sequential`, trained on the same data the way `fit`
does, steps of both in turns; `ratio` is that of neighbouring steps.

dispatch: the slope of the step time with the number of tasks, for layers that
compute next to nothing; beside it, that of calls of an empty function.

tracing: a `fit` of one step, which builds and traces, for identical small
Transformer blocks; and what of it the trial of the layers takes, for those and
for as many layers of Keras.

safety: what `skip_nonfinite` and checkpoints in the background add.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.schedules import CHUNKS, SCHEDULES
from tfgpipe.trial import Trial
from tools.bench import dispatch, safety
from tools.bench.dispatch import pipeline, step_of
from tools.bench.flags import define_choices, define_numbers, new_flags
from tools.bench.models import MODELS, train_step, transformer
from tools.report import (
    Column,
    Report,
    Table,
    alternated,
    progress,
    spread,
    spread_columns,
    spread_values,
)

FLAGS = new_flags(rounds=15)
define_choices(
    FLAGS,
    "part",
    ["step", "dispatch", "tracing"],
    ["step", "dispatch", "tracing", "safety"],
    "What to measure.",
)
define_choices(
    FLAGS,
    "model",
    ["transformer", "convolutions"],
    MODELS,
    "In parts step and safety.",
)
define_choices(
    FLAGS,
    "schedule",
    ["gpipe"],
    [name for name, chunks in CHUNKS.items() if chunks != 2],
    "In parts dispatch and tracing.",
)
flags.DEFINE_integer(
    "dispatch_k", 4, "Cells, in part dispatch.", 1, flag_values=FLAGS
)
define_numbers(
    FLAGS, "dispatch_m", [8, 16, 32, 64], "Micro-batches, in part dispatch."
)
define_numbers(FLAGS, "l", [12, 48], "Layers, in part tracing.")
define_numbers(FLAGS, "k", [2, 8], "Cells, in part tracing.")
define_numbers(FLAGS, "m", [8, 32], "Micro-batches, in part tracing.")
flags.DEFINE_integer(
    "threads",
    0,
    "Threads for operations, and for each operation. 0: as TensorFlow does.",
    0,
    flag_values=FLAGS,
)
flags.DEFINE_boolean(
    "rewrite_graphs",
    True,
    "Whether TensorFlow rewrites graphs before it runs them, as it does if "
    "nobody says otherwise.",
    flag_values=FLAGS,
)

STEP_COLUMNS = [
    Column("model", "model"),
    *spread_columns("keras_ms", "Keras ms", ".1f"),
    *spread_columns("gpipe_ms", "GPipe ms", ".1f"),
    *spread_columns("ratio", "ratio", ".3f"),
    Column("keras_first_step_s", "Keras first step s", ".2f"),
    Column("gpipe_first_step_s", "GPipe first step s", ".2f"),
]
DISPATCH_COLUMNS = [
    Column("what", "what"),
    Column("k", "K"),
    Column("fewest", "fewest"),
    Column("most", "most"),
    Column("us", "us each", ".0f"),
    Column("correlation", "correlation", ".3f"),
]
TRACING_COLUMNS = [
    Column("schedule", "schedule"),
    Column("l", "L"),
    Column("k", "K"),
    Column("m", "M"),
    Column("num_tasks", "tasks"),
    Column("first_step_s", "first step s", ".1f"),
    Column("step_ms", "step ms", ".0f"),
    Column("keras_first_step_s", "Keras first step s", ".1f"),
    Column("keras_ratio", "/ Keras", ".2f"),
]

TRIAL_COLUMNS = [
    Column("layers", "layers"),
    Column("l", "L"),
    Column("k", "K"),
    Column("m", "M"),
    Column("first_step_s", "first step s", ".1f"),
    Column("trial_s", "trial s", ".2f"),
    Column("share", "share", ".3f"),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    parts = {
        "step": _steps,
        "dispatch": _dispatch,
        "tracing": _tracing,
        "safety": _safety,
    }
    if "dispatch" in values.part and len(set(values.dispatch_m)) < 2:
        raise BadFlags(
            "--dispatch_m must have two numbers or more, for a slope. "
            f"Received: --dispatch_m={values.dispatch_m[0]}."
        )
    make_devices(max(values.dispatch_k, *values.k), values)
    _warm_up()
    for part in dict.fromkeys(values.part):
        parts[part](values, report)


def make_devices(num_devices: int, values: flags.FlagValues) -> None:
    """Splits the CPU; more devices than are used do nothing."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    tf.config.threading.set_intra_op_parallelism_threads(values.threads)
    tf.config.threading.set_inter_op_parallelism_threads(values.threads)
    if not values.rewrite_graphs:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": True}
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
    for name in dict.fromkeys(values.model):
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


# -------------------------------------------------------------------- safety
def _safety(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "safety",
            "Two cells, eight micro-batches, Adam: median and quartiles of "
            f"{values.rounds} turns",
            safety.COLUMNS,
        )
    )
    for name in dict.fromkeys(values.model):
        table.rows += safety.rows(name, MODELS[name], values.rounds)


# ------------------------------------------------------------------ dispatch
def _dispatch(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "dispatch",
            f"Dispatch: slope of the median of {values.rounds} steps",
            DISPATCH_COLUMNS,
        )
    )
    k, rounds = values.dispatch_k, values.rounds
    micro_batches = sorted(set(values.dispatch_m))
    schedules = list(dict.fromkeys(values.schedule))
    for schedule in progress(schedules, "dispatch"):
        slope = dispatch.task_slope(schedule, k, micro_batches, rounds)
        row = {"what": f"tasks of {schedule}", "k": k}
        table.rows.append(row | slope._asdict())
    slope = dispatch.call_slope(rounds)
    table.rows.append({"what": "empty function calls"} | slope._asdict())


# ------------------------------------------------------------------- tracing
def _fit_seconds(model: keras.Model, x: np.ndarray) -> float:
    """Seconds of the first step, for somebody who calls `fit`."""
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    start = time.perf_counter()
    model.fit(x, x, batch_size=len(x), verbose=0)
    return time.perf_counter() - start


def _tracing(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "tracing",
            "A `fit` of one step, which builds and traces identical "
            "Transformer blocks with 32 units, on 8 positions",
            TRACING_COLUMNS,
        )
    )
    settings = [
        (schedule, num_layers, k, m)
        for num_layers in dict.fromkeys(values.l)
        for schedule in dict.fromkeys(values.schedule)
        for k in dict.fromkeys(values.k)
        if k <= num_layers
        for m in dict.fromkeys(values.m)
    ]
    plain: dict[tuple[int, int], float] = {}
    for schedule, num_layers, k, m in progress(settings, "tracing"):
        x = np.ones((m, 8, 32), np.float32)

        def blocks(count: int = num_layers) -> list[Any]:
            return transformer(count, num_heads=2, hidden_units=64)

        size = num_layers, m
        if size not in plain:
            plain[size] = _fit_seconds(keras.Sequential(blocks()), x)
        model = pipeline(blocks(), k, m, schedule)
        first = _fit_seconds(model, x)
        step = train_step(model, x, x)
        step()  # its data may come in another way than those of `fit`
        table.rows.append(
            {
                "schedule": schedule,
                "l": num_layers,
                "k": k,
                "m": m,
                "num_tasks": len(SCHEDULES[schedule](k, m).order()),
                "first_step_s": first,
                "step_ms": 1000 * statistics.median(step() for _ in range(3)),
                "keras_first_step_s": plain[size],
                "keras_ratio": first / plain[size],
            }
        )
    _trials(values, report)


def _trials(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "trial",
            "What the trial of the layers takes of such a `fit`, with blocks "
            "of one's own and with as many layers of Keras",
            TRIAL_COLUMNS,
        )
    )
    k, m = values.k[0], values.m[0]
    settings = [
        (layers, num_layers)
        for num_layers in dict.fromkeys(values.l)
        for layers in ("own", "Keras's")
        if k <= num_layers
    ]
    for layers, num_layers in progress(settings, "trial"):
        x = np.ones((m, 8, 32), np.float32)
        model = pipeline(
            transformer(num_layers, num_heads=2, hidden_units=64)
            if layers == "own"
            else [keras.layers.Dense(32, "gelu") for _ in range(num_layers)],
            k,
            m,
        )
        with _trial_timed() as seconds:
            first = _fit_seconds(model, x)
        table.rows.append(
            {
                "layers": layers,
                "l": num_layers,
                "k": k,
                "m": m,
                "first_step_s": first,
                "trial_s": sum(seconds),
                "share": sum(seconds) / first,
            }
        )


@contextlib.contextmanager
def _trial_timed() -> Iterator[list[float]]:
    """Inside, notes the seconds that each trial takes."""
    seconds: list[float] = []
    run = Trial.run

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        run(*args)
        seconds.append(time.perf_counter() - start)

    with mock.patch.object(Trial, "run", timed):
        yield seconds
