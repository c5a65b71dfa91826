"""Steps of replicas in one process beside those in several worker processes."""

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tools.bench.efficiency import Setting
from tools.bench.replica_worker import Job
from tools.bench.step_worker import Worker, in_turns
from tools.report import (
    Column,
    Report,
    Table,
    spread,
    spread_columns,
    spread_values,
)

COLUMNS = [
    Column("r", "R"),
    Column("k", "K"),
    Column("m", "M"),
    Column("cell_mib", "cell MiB", "g"),
    Column("processes", "processes"),
    Column("bound_ms", "bound ms", ".1f"),
    *spread_columns("step_ms", "step ms", ".1f"),
    Column("efficiency", "efficiency", ".3f"),
    Column("more_ms", "more ms", ".1f"),
    Column("exchanged_mib", "exchanged MiB", ".2f"),
    Column("first_step_s", "first step s", ".1f"),
    Column("others", "others", ".0%"),
]


def measure(values: flags.FlagValues, report: Report) -> None:
    """Adds the table that the flags ask for."""
    table = report.add(
        Table(
            "processes",
            f"Steps of cells of {values.cell_ms:g} ms in one process and in "
            f"workers: median and quartiles of {values.rounds}",
            COLUMNS,
            notes=[
                "more ms: than one process takes.",
                "exchanged MiB: weights and gradients, between replicas.",
                "others: share of the machine that other processes used.",
            ],
        )
    )
    for jobs in _groups(values):
        one = jobs[0]
        what = f"R={one.r} K={one.k} M={one.m} {one.cell_mib:g} MiB"
        workers = in_turns(jobs, values.rounds, what)
        table.rows += [_row(job, workers) for job in jobs]


def _groups(values: flags.FlagValues) -> list[list[Job]]:
    """The jobs of each R, K and M, which take turns."""
    groups = []
    for r in values.r:
        for k in values.k:
            counts = [n for n in values.processes if r * k % n == 0]
            counts = list(dict.fromkeys([1, *counts]))
            groups += [
                [Job(r, k, m, values.cell_ms, mib, count) for count in counts]
                for m in values.m
                for mib in values.cell_mib
                if len(counts) > 1
            ]
    if not groups:
        raise BadFlags(
            "--processes must have a number above 1 that divides R K. "
            f"Received: --processes={values.processes}, with --r={values.r} "
            f"and --k={values.k}. Give such as --processes=2 --r=2 --k=2."
        )
    return groups


def _row(job: Job, workers: dict[Job, Worker]) -> dict:
    one = Setting("gpipe", "except_last", "equal", job.cell_ms, job.k, job.m, 1)
    bound = 1000 * one.bound()
    step, alone = (
        spread([1000 * step.seconds for step in workers[which].steps])
        for which in (job, job._replace(processes=1))
    )
    ready = workers[job].ready
    return {
        **job._asdict(),
        "bound_ms": bound,
        **spread_values("step_ms", step),
        "efficiency": bound / step.median,
        "more_ms": step.median - alone.median,
        "exchanged_mib": ready["exchanged_mib"],
        "first_step_s": ready["first_step"],
        "others": spread([s.others for s in workers[job].steps]).median,
    }
