"""Predicted bytes of an accelerator beside those of a worker process."""

from __future__ import annotations

import itertools

import keras

from tfgpipe.plans import Prediction, Setting, predict
from tfgpipe.plans import sized as sized_model
from tfgpipe.sequence import source_of
from tools.bench import memory_trial
from tools.bench.memory_trial import Job, Size, cut_of, layers_of, optimizer_of
from tools.bench.plan_steps import compared, compared_columns, with_errors
from tools.report import Column, Table, progress
from tools.sizes.model_size import by_cost

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
_COLUMNS = [
    Column("schedule", "schedule"),
    Column("remat", "remat"),
    Column("width", "width"),
    Column("layers", "L"),
    Column("k", "K"),
    Column("m", "M"),
    Column("groups", "groups"),
    Column("words", "words"),
    Column("head_parts", "head_parts"),
    Column("weights_on", "weights on"),
    Column("device", "device"),
    *compared_columns("MiB"),
]


def table(rounds: int) -> Table:
    """Every setting, a line an accelerator; the errors below.

    Args:
        rounds: Steps whose peak is measured.
    """
    found = Table(
        "memory",
        f"Memory of accelerators that are processes, {len(JOBS)} settings: "
        "weights, slots, gradients and activations at the peak of a step",
        _COLUMNS,
    )
    for job in progress(JOBS, "memory"):
        outcome = memory_trial.run(job._replace(num_steps=rounds))
        prediction = predicted(job)
        for device, use in enumerate(outcome.uses):
            measured = use.held + use.gradients + use.activations
            expected = prediction.memory[device].total / _MIB
            found.rows.append(
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
                    **compared("MiB", measured, expected),
                }
            )
    return with_errors(found, "accelerators")


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
