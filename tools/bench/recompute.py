"""Recomputation in a `GPipe` beside `tf.recompute_grad` in plain Keras.

Both cut the same Transformer blocks into the same groups, and on one device
keep the inputs of the groups of a mini-batch: plain Keras by
`tf.recompute_grad` around each, a `GPipe` of one cell by `remat_groups`, with
remat="always". Beside them is plain Keras that keeps everything, and a `GPipe`
with micro-batches.

Every way is a process of its own, on one core. They take turns, a step at a
time, so that all of them see the same machine. Memory is the peak of a step
above what the process rests at, in a run of its own in which freed memory goes
back at once.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tools.bench.flags import define_numbers, new_flags
from tools.bench.recompute_worker import Job
from tools.bench.step_worker import Worker, in_turns, measure_memory
from tools.report import (
    Column,
    Report,
    Table,
    spread,
    spread_columns,
    spread_values,
)

FLAGS = new_flags(rounds=9)
for _name, _default, _meaning in (
    ("layers", 8, "Transformer blocks."),
    ("width", 128, "Units of a block; 4 times as many inside."),
    ("sequence", 64, "Positions in an example."),
    ("batch_size", 64, "Examples in a mini-batch."),
):
    flags.DEFINE_integer(_name, _default, _meaning, 1, flag_values=FLAGS)
define_numbers(FLAGS, "groups", [2, 4, 8], "Groups of blocks.")
define_numbers(FLAGS, "m", [1, 8], "Micro-batches of a `GPipe`.")

# With the graph optimiser on, `tf.recompute_grad` saves next to no memory: see
# docs/measurements_memory.md.
_BASE = "recompute_grad, as written"

COLUMNS = [
    Column("way", "way"),
    Column("groups", "groups"),
    Column("m", "M"),
    *spread_columns("step_ms", "step ms", ".0f"),
    Column("time_ratio", "/ recompute_grad", ".3f"),
    Column("activations_mib", "activations MiB", ".1f"),
    Column("memory_ratio", "/ recompute_grad", ".2f"),
    Column("others", "others", ".0%"),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    _check(values)
    jobs = _jobs(values)
    table = report.add(
        Table(
            "recompute",
            f"{values.layers} Transformer blocks of {values.width} units on "
            f"one core, {values.sequence} positions, batches of "
            f"{values.batch_size}: median and quartiles of {values.rounds} "
            "steps",
            COLUMNS,
            notes=[
                "/ recompute_grad: the same groups in plain Keras.",
                "activations: and gradients; the peak of a step.",
                "others: share of the machine that other processes used",
            ],
        )
    )
    workers = in_turns(jobs, values.rounds, "steps")
    memory = measure_memory(jobs, "memory")
    table.rows += [_row(job, workers, memory) for job in jobs]


def _check(values: flags.FlagValues) -> None:
    if max(values.groups) > values.layers:
        raise BadFlags(
            f"--groups must be at most --layers, {values.layers}. Received: "
            f"--groups={max(values.groups)}."
        )
    if max(values.m) > values.batch_size:
        raise BadFlags(
            f"--m must be at most --batch_size, {values.batch_size}. Received: "
            f"--m={max(values.m)}."
        )


def _jobs(values: flags.FlagValues) -> list[Job]:
    size = values.layers, values.width, values.sequence, values.batch_size
    jobs = [Job("keras", 1, 1, *size)]
    for groups in dict.fromkeys(values.groups):
        jobs += [
            Job(way, groups, 1, *size) for way in ("recompute_grad", _BASE)
        ]
        jobs += [
            Job("gpipe", groups, m, *size) for m in dict.fromkeys(values.m)
        ]
    return jobs


def _row(
    job: Job, workers: dict[Job, Worker], memory: dict[Job, float]
) -> dict[str, Any]:
    steps = workers[job].steps
    step = spread([s.seconds for s in steps])
    row = {
        **job._asdict(),
        "way": {"keras": "Keras, all kept"}.get(job.way, job.way),
        **spread_values("step_ms", step.times(1000)),
        "activations_mib": memory[job],
        "others": spread([s.others for s in steps]).median,
    }
    base = job._replace(way=_BASE, m=1)
    if base in workers:
        theirs = spread([s.seconds for s in workers[base].steps])
        row["time_ratio"] = step.median / theirs.median
        row["memory_ratio"] = memory[job] / memory[base]
    return row
