"""Predictions of the planner beside measurements.

`steps` has steps of two devices, predicted from layers that were measured one
by one, on one device, while the other one trains: two cores of a machine share
its caches and its memory, and slow each other down, as two accelerators do not.
No setting is used to calibrate. `memory` has bytes of accelerators, beside
worker processes whose memory is measured.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
from absl import flags

import tfgpipe
from tfgpipe.devices import local
from tfgpipe.plans import Prediction, Setting, SizedModel, predict
from tfgpipe.plans import sized as sized_model
from tfgpipe.sequence import source_of
from tools.bench import memory_trial
from tools.bench.memory_trial import Job, Size, cut_of, layers_of, optimizer_of
from tools.bench.models import MODELS, BenchModel
from tools.flags import define, new_flags
from tools.report import Column, Report, Table, columns, progress, spread
from tools.sizes.model_size import by_cost

_TABLES = ["memory", "steps"]
FLAGS = new_flags(rounds=5)
define(
    FLAGS,
    table=(_TABLES, "What to compare.", _TABLES),
)


def run(values: flags.FlagValues, report: Report) -> None:
    """Makes the tables that the flags ask for."""
    for name in dict.fromkeys(values.table):
        if name == "memory":
            report.add(_memory(values.rounds))
        else:
            report.add(_steps(values.rounds))


def _compared_columns(unit: str) -> list[Column]:
    """Columns for `_compared`."""
    return [
        Column(f"measured_{unit.lower()}", f"measured {unit}", ".1f"),
        Column(f"predicted_{unit.lower()}", "predicted", ".1f"),
        Column("error", "error", "+.1%"),
    ]


def _compared(unit: str, measured: float, predicted: float) -> dict[str, float]:
    """The values of a row for `_compared_columns`, in this unit."""
    return {
        f"measured_{unit.lower()}": measured,
        f"predicted_{unit.lower()}": predicted,
        "error": predicted / measured - 1,
    }


def _with_errors(table: Table, what: str) -> Table:
    """Notes how large the errors of a table are."""
    errors = [abs(row["error"]) for row in table.rows]
    table.notes.append(
        f"Errors: median {statistics.median(errors):.1%}, worst "
        f"{max(errors):.1%}, of {len(errors)} {what}"
    )
    return table


_STEP_COLUMNS = [
    *columns("model | schedule | remat | k: K | m: M"),
    *_compared_columns("ms"),
]
SETTINGS = [
    ("gpipe", "never", 4),
    ("gpipe", "except_last", 8),
    ("gpipe", "always", 4),
    ("1f1b", "never", 8),
    ("1f1b", "except_last", 4),
    ("zero_bubble", "never", 4),
    ("zero_bubble", "except_last", 8),
    ("interleaved", "except_last", 4),
]


def _steps(rounds: int) -> Table:
    """Steps of real models."""
    local.split_cpu(2)
    table = Table(
        "steps",
        "Steps as predicted from layers that were measured one by one, and as "
        "measured: two devices of a core each",
        _STEP_COLUMNS,
    )
    models = [
        _measured(name, MODELS[name]) for name in progress(MODELS, "layers")
    ]
    runs = list(itertools.product(models, SETTINGS))
    for model, setting in progress(runs, "steps"):
        table.rows.append(_step_row(model, *setting, rounds))
    return _with_errors(table, "settings")


class _Measured(NamedTuple):
    """A model of which layers are measured."""

    name: str
    model: BenchModel
    profile: Any
    sized: SizedModel


def _measured(name: str, model: BenchModel) -> _Measured:
    """Measures the layers on one device while the other one trains."""
    layers = [keras.Input(model.x_shape), *model.layers()]
    x, y = model.data()
    with _training_beside(model):
        profile = tfgpipe.profile(
            layers,
            x,
            y,
            loss=model.loss,
            micro_batch_sizes=[model.batch_size // m for m in (32, 8, 1)],
            device="CPU:0",
            seconds=30.0,
            optimizer="sgd",
            verbose=0,
        )
    sized = sized_model(source_of(layers), None, "sgd")
    return _Measured(name, model, profile, sized)


@contextlib.contextmanager
def _training_beside(model: BenchModel) -> Iterator[None]:
    """Inside, the other device trains such a model."""
    pipeline = tfgpipe.GPipe(
        [keras.Input(model.x_shape), *model.layers()],
        num_partitions=1,
        num_micro_batches=8,
        devices=["CPU:1"],
    )
    step = model.step(pipeline)
    step()  # traces
    has_ended = threading.Event()

    def train() -> None:
        while not has_ended.is_set():
            step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _step_row(
    measured: _Measured, schedule: str, remat: str, m: int, rounds: int
) -> dict[str, Any]:
    """Predicts and measures a setting with two devices, cut by seconds."""
    model = measured.model
    k = 4 if schedule == "interleaved" else 2
    workload = measured.sized.by_profile(measured.profile, model.batch_size / m)
    cut = tuple(measured.sized.placed.source.cut(workload.costs, k))
    setting = Setting(1, 2, cut, m, schedule, (remat,) * k)
    predicted_seconds = predict(workload, setting, None).step_seconds
    pipeline = tfgpipe.GPipe(
        [keras.Input(model.x_shape), *model.layers()],
        num_partitions=k,
        num_micro_batches=m,
        devices=["CPU:0", "CPU:1"],
        layers_per_cell=cut,
        schedule=schedule,
        remat=remat,
    )
    step = model.step(pipeline)
    _, _, *times = [step() for _ in range(rounds + 2)]
    return {
        "model": measured.name,
        "schedule": schedule,
        "remat": remat,
        "k": k,
        "m": m,
        **_compared("ms", 1e3 * spread(times).median, 1e3 * predicted_seconds),
    }


_MIB = 2**20
# Activations outweigh weights, or weights outweigh activations.
_WIDE = Size(width=512, sequence=16, batch_size=32)
_LONG = Size(sequence=128, batch_size=64)
_FEW = Size(batch_size=64)
JOBS = [
    Job(Size(), 4, 2, 4, "gpipe", "never"),
    Job(Size(), 4, 2, 8, "gpipe", "except_last"),
    Job(Size(), 8, 2, 8, "gpipe", "always"),
    Job(Size(), 4, 2, 8, "1f1b", "never"),
    Job(Size(), 8, 2, 8, "1f1b", "except_last"),
    Job(Size(), 4, 4, 16, "1f1b", "always"),
    Job(Size(), 8, 4, 8, "1f1b", "never"),
    Job(Size(), 8, 2, 4, "zero_bubble", "except_last"),
    Job(Size(), 4, 2, 8, "zero_bubble", "never"),
    Job(Size(), 4, 2, 8, "interleaved", "except_last", chunks=2),
    Job(Size(), 8, 2, 8, "interleaved", "never", chunks=2),
    Job(Size(), 8, 2, 4, "gpipe", "always", remat_groups=2),
    Job(Size(), 8, 1, 8, "gpipe", "except_last"),
    Job(Size(), 8, 1, 4, "gpipe", "always", remat_groups=4),
    Job(_LONG, 4, 2, 4, "gpipe", "except_last"),
    Job(_LONG, 4, 2, 8, "1f1b", "never"),
    Job(_WIDE, 4, 2, 4, "gpipe", "never"),
    Job(_WIDE, 4, 2, 4, "1f1b", "always"),
    Job(_WIDE._replace(optimizer="sgd"), 4, 2, 8, "zero_bubble", "never"),
    Job(_WIDE, 4, 1, 1, "gpipe", "never"),
    # Shares, heads, and the host.
    Job(Size(), 4, 2, 8, "gpipe", 0.4),
    Job(Size(), 4, 2, 8, "1f1b", 0.7),
    Job(_FEW, 4, 2, 8, "gpipe", "except_last", words=8000),
    Job(_FEW, 4, 2, 8, "gpipe", "except_last", words=8000, head_parts=4),
    Job(_FEW, 4, 2, 8, "1f1b", "always", words=8000, head_parts=2),
    Job(Size(), 4, 2, 8, "gpipe", "offload", is_on_host=True),
    Job(_LONG, 8, 2, 16, "1f1b", "always", is_on_host=True),
    Job(_WIDE, 8, 2, 4, "breadth_first", "always", chunks=4, is_on_host=True),
]
_MEMORY_COLUMNS = [
    *columns(
        "schedule | remat | width | layers: L | k: K | m: M | groups | words | "
        "head_parts | weights_on: weights on | device"
    ),
    *_compared_columns("MiB"),
]


def _memory(rounds: int) -> Table:
    """Every setting, a line an accelerator; the errors below."""
    table = Table(
        "memory",
        f"Memory of accelerators that are processes, {len(JOBS)} settings: "
        "weights, slots, gradients and activations at the peak of a step",
        _MEMORY_COLUMNS,
    )
    for job in progress(JOBS, "memory"):
        outcome = memory_trial.run(job._replace(num_steps=rounds))
        prediction = predicted(job)
        for device, use in enumerate(outcome.uses):
            measured = use.held + use.gradients + use.activations
            expected = prediction.memory[device].total / _MIB
            table.rows.append(
                {
                    "schedule": job.schedule,
                    "remat": job.remat,
                    "width": job.size.width,
                    "layers": job.num_layers,
                    "k": job.k,
                    "m": job.m,
                    "groups": job.remat_groups,
                    "words": job.words or 1,
                    "head_parts": job.head_parts,
                    "weights_on": _place(job),
                    "device": device,
                    **_compared("MiB", measured, expected),
                }
            )
    return _with_errors(table, "accelerators")


def predicted(job: Job) -> Prediction:
    """What the planner says of a trial."""
    source = source_of(layers_of(job))
    optimizer = keras.optimizers.get(optimizer_of(job))
    model = sized_model(source, None, optimizer)
    # Seconds decide nothing but how a cell falls into groups.
    workload = by_cost(model, job.size.batch_size / job.m)
    cut = tuple(source.steps_per_cell(cut_of(job)))
    rules = tuple(itertools.repeat(job.remat, len(cut)))
    setting = Setting(
        1,
        job.k,
        cut,
        job.m,
        job.schedule,
        rules,
        job.remat_groups or 1,
        job.head_parts,
        _place(job),
    )
    return predict(workload, setting, None)


def _place(job: Job) -> str:
    """Where the weights are."""
    return "host" if job.is_on_host else "devices"
