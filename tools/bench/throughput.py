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

from tfgpipe.schedules import CHUNKS, REMAT, SCHEDULES
from tools.bench.models import MODELS
from tools.bench.step_worker import Worker, in_turns, median, timed_row
from tools.bench.training_worker import Job
from tools.flags import define, new_flags
from tools.report import Report, Table, columns

FLAGS = new_flags(rounds=7)
define(
    FLAGS,
    model=(["transformer", "amoebanet"], "What is trained.", MODELS),
    k=([1, 2], "Devices, a core each."),
    m=([1, 4, 8, 16, 32], "Micro-batches."),
    batch_size=(
        int,
        "Examples in a mini-batch. Default: 32, with convolutions 64.",
    ),
    schedule=(["gpipe"], "Schedules.", SCHEDULES),
    remat=(
        ["always"],
        "What is recomputed; with always, all configurations compute the same.",
        REMAT,
    ),
    jit_compile=(["off"], "Whether XLA compiles each cell.", ["off", "on"]),
    chunks=(2, "Cells of a device, if interleaved."),
)

COLUMNS = columns(
    "model | schedule | remat | jit: XLA | k: K | m: M | "
    "*step_ms: step ms: .0f | examples_per_s: examples/s: .1f | "
    "speedup: speed-up: .2f | ideal: ideal: .2f | fraction: of ideal: .0% | "
    "speedup_same_m: same M: .2f | fraction_same_m: of ideal: .0% | "
    "others: others: .0%"
)


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
        raise ValueError(
            "--k must be at most the number of cores that this process may "
            f"use, {cores}. Received: --k={max(values.k)}."
        )
    smallest = min(job.batch_size for job in jobs)
    if max(values.m) > smallest:
        raise ValueError(
            f"--m must be at most --batch_size, {smallest}. Received: "
            f"--m={max(values.m)}."
        )


def _jobs(values: flags.FlagValues, model: str) -> list[Job]:
    batch_size = values.batch_size or MODELS[model].batch_size
    shapes = [(k, m) for k in values.k for m in values.m]
    return [
        Job(
            model,
            batch_size,
            k,
            m,
            schedule,
            remat,
            CHUNKS[schedule] or values.chunks,
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
    row = timed_row(job, workers)
    seconds = row["step_ms"] / 1000
    ideal = job.k * job.m / (job.m + job.k - 1)
    row |= {"examples_per_s": job.batch_size / seconds, "ideal": ideal}
    one_cell = job._replace(k=1)  # compiled or not, as the job
    for suffix, base in (("", one_cell._replace(m=1)), ("_same_m", one_cell)):
        if base in workers:
            speedup = median(workers[base].steps) / seconds
            row[f"speedup{suffix}"] = speedup
            row[f"fraction{suffix}"] = speedup / ideal
    return row
