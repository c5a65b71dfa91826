"""Speed-up with the number of cells and micro-batches, on real models.

The paper's table 2, with a core of the CPU as an accelerator: K = 2 uses two
cores, and K = 1 is pinned to one; every device runs its operations on one
thread. Every configuration is a process of its own; they take turns, one step
at a time, so that all of them see the same machine.

`speed-up` is over K = 1 and M = 1, which is always measured too, `ideal` is
K M / (M + K - 1), and `same M` is the speed-up over K = 1 with the same number
of micro-batches: what is left of it when small micro-batches alone do not cost
anything.
"""

import os

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.schedules import CHUNKS, REMAT, SCHEDULES
from tools.bench.flags import define_choices, define_numbers, new_flags
from tools.bench.models import MODELS
from tools.bench.step_worker import Worker, in_turns
from tools.bench.throughput_worker import Job
from tools.report import (
    Column,
    Report,
    Table,
    spread,
    spread_columns,
    spread_values,
)

FLAGS = new_flags(rounds=7)
define_choices(
    FLAGS, "model", ["transformer", "amoebanet"], MODELS, "What is trained."
)
define_numbers(FLAGS, "k", [1, 2], "Devices, a core each.")
define_numbers(FLAGS, "m", [1, 4, 8, 16, 32], "Micro-batches.")
flags.DEFINE_integer(
    "batch_size",
    None,
    "Examples in a mini-batch. Default: 32, with convolutions 64.",
    1,
    flag_values=FLAGS,
)
define_choices(FLAGS, "schedule", ["gpipe"], SCHEDULES, "Schedules.")
define_choices(
    FLAGS,
    "remat",
    ["always"],
    REMAT,
    "What is recomputed; with always, all configurations compute the same.",
)
define_choices(
    FLAGS,
    "jit_compile",
    ["off"],
    ["off", "on"],
    "Whether XLA compiles each cell.",
)
flags.DEFINE_integer(
    "chunks", 2, "Cells of a device, if interleaved.", 1, flag_values=FLAGS
)

COLUMNS = [
    Column("model", "model"),
    Column("schedule", "schedule"),
    Column("remat", "remat"),
    Column("jit", "XLA"),
    Column("k", "K"),
    Column("m", "M"),
    *spread_columns("step_ms", "step ms", ".0f"),
    Column("examples_per_s", "examples/s", ".1f"),
    Column("speedup", "speed-up", ".2f"),
    Column("ideal", "ideal", ".2f"),
    Column("fraction", "of ideal", ".0%"),
    Column("speedup_same_m", "same M", ".2f"),
    Column("fraction_same_m", "of ideal", ".0%"),
    Column("others", "others", ".0%"),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    groups = [
        (model, _jobs(values, model)) for model in dict.fromkeys(values.model)
    ]
    _check(values, [job for _, jobs in groups for job in jobs])
    for name, jobs in groups:
        table = report.add(
            Table(
                f"throughput_{name}",
                f"{MODELS[name].description}, batches of "
                f"{jobs[0].batch_size}: median and quartiles of "
                f"{values.rounds} steps",
                COLUMNS,
                notes=[
                    "others: share of the machine that other processes used "
                    "meanwhile"
                ],
            )
        )
        table.rows += _rows(jobs, values.rounds)


def _check(values: flags.FlagValues, jobs: list[Job]) -> None:
    cores = len(os.sched_getaffinity(0))
    if max(values.k) > cores:
        raise BadFlags(
            "--k must be at most the number of cores that this process may "
            f"use, {cores}. Received: --k={max(values.k)}."
        )
    smallest = min(job.batch_size for job in jobs)
    if max(values.m) > smallest:
        raise BadFlags(
            f"--m must be at most --batch_size, {smallest}. Received: "
            f"--m={max(values.m)}."
        )


def _jobs(values: flags.FlagValues, model: str) -> list[Job]:
    batch_size = values.batch_size or MODELS[model].batch_size
    shapes = [(k, m) for k in values.k for m in values.m]
    return [
        Job(
            model,
            schedule,
            remat,
            k,
            m,
            CHUNKS[schedule] or values.chunks,
            batch_size,
            jit,
        )
        for jit in values.jit_compile
        for schedule in values.schedule
        for remat in values.remat
        for k, m in dict.fromkeys([(1, 1), *shapes])
    ]


def _rows(jobs: list[Job], rounds: int) -> list[dict]:
    """Runs all jobs at the same time, taking turns."""
    workers = in_turns(jobs, rounds, jobs[0].model)
    return [_row(job, workers) for job in jobs]


def _row(job: Job, workers: dict[Job, Worker]) -> dict:
    def median(job: Job) -> float | None:
        worker = workers.get(job)
        return worker and spread([s.seconds for s in worker.steps]).median

    steps = workers[job].steps
    step = spread([s.seconds for s in steps])
    ideal = job.k * job.m / (job.m + job.k - 1)
    row = {
        **job._asdict(),
        **spread_values("step_ms", step.times(1000)),
        "examples_per_s": job.batch_size / step.median,
        "ideal": ideal,
        "others": spread([s.others for s in steps]).median,
    }
    one_cell = job._replace(k=1)  # compiled or not, as the job
    for suffix, base in (("", one_cell._replace(m=1)), ("_same_m", one_cell)):
        if seconds := median(base):
            row[f"speedup{suffix}"] = seconds / step.median
            row[f"fraction{suffix}"] = seconds / step.median / ideal
    return row
