"""Speed-up with the number of cells and micro-batches, on real models.

The paper's table 2, with a core of the CPU as an accelerator: K = 2 uses two
cores, and K = 1 is pinned to one; every device runs its operations on one
thread, and recomputes all. Every configuration is a process of its own; they
take turns, one step at a time, so that all of them see the same machine.

`speed-up` is over K = 1 and M = 1, which is always measured too, `ideal` is
K M / (M + K - 1), and `same M` is the speed-up over K = 1 with the same number
of micro-batches: what is left of it when small micro-batches alone do not cost
anything.
"""

import itertools
import os

from absl import flags

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
)

COLUMNS = columns(
    "model | k: K | m: M | "
    "*step_ms: step ms: .0f | examples_per_s: examples/s: .1f | "
    "speedup: speed-up: .2f | ideal: ideal: .2f | fraction: of ideal: .0% | "
    "speedup_same_m: same M: .2f | fraction_same_m: of ideal: .0% | "
    "others: others: .0%"
)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    cores = len(os.sched_getaffinity(0))
    if max(values.k) > cores:
        raise ValueError(
            "--k must be at most the number of cores that this process may "
            f"use, {cores}. Received: --k={max(values.k)}."
        )
    for name in dict.fromkeys(values.model):
        model = MODELS[name]
        table = report.add(
            Table(
                f"throughput_{name}",
                f"{model.description}, batches of {model.batch_size}: median "
                f"and quartiles of {values.rounds} steps",
                COLUMNS,
                notes=[
                    "others: share of the machine that other processes used "
                    "meanwhile"
                ],
            )
        )
        shapes = [(1, 1), *itertools.product(values.k, values.m)]
        jobs = [Job(name, k, m) for k, m in dict.fromkeys(shapes)]
        workers = in_turns(jobs, values.rounds, name)
        table.rows += [_row(job, workers) for job in jobs]


def _row(job: Job, workers: dict[Job, Worker]) -> dict:
    row = timed_row(job, workers)
    seconds = row["step_ms"] / 1000
    ideal = job.k * job.m / (job.m + job.k - 1)
    examples = MODELS[job.model].batch_size
    row |= {"examples_per_s": examples / seconds, "ideal": ideal}
    one_cell = job._replace(k=1)
    for suffix, base in (("", one_cell._replace(m=1)), ("_same_m", one_cell)):
        if base in workers:
            speedup = median(workers[base].steps) / seconds
            row[f"speedup{suffix}"] = speedup
            row[f"fraction{suffix}"] = speedup / ideal
    return row
