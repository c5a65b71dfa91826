"""Steps of workers whose links take time, by what their schedules allow for."""

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.schedules import Schedule
from tools.bench.replica_worker import Job
from tools.bench.step_worker import in_turns
from tools.report import (
    Column,
    Report,
    Table,
    spread,
    spread_columns,
    spread_values,
)

COLUMNS = [
    Column("schedule", "schedule"),
    Column("k", "devices"),
    Column("chunks", "cells each"),
    Column("m", "M"),
    Column("link_ms", "link ms", "g"),
    Column("share", "made for", "g"),
    Column("held", "held"),
    Column("bound_ms", "bound ms", ".1f"),
    *spread_columns("step_ms", "step ms", ".1f"),
    Column("hidden", "hidden", ".0%"),
]
_CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


def measure(values: flags.FlagValues, report: Report) -> None:
    """Adds the table that the flags ask for."""
    if min(values.link_ms, values.cell_ms, *(k - 1 for k in values.k)) <= 0:
        raise BadFlags(
            "Links need --link_ms and --cell_ms above 0, and --k of 2 or more. "
            f"Received: --link_ms={values.link_ms:g}, "
            f"--cell_ms={values.cell_ms:g} and --k={values.k}."
        )
    table = report.add(
        Table(
            "links",
            f"Devices of {values.cell_ms:g} ms a forward task, each a worker: "
            f"median and quartiles of {values.rounds}",
            COLUMNS,
            notes=[
                "made for: what a link takes of a cell's time, as the schedule "
                "was told.",
                "held: micro-batches of the first device.",
                "bound: of the tasks and links alone.",
                "hidden: share of all transfers on a link, except the first "
                "way there and the last one back, that do not make the step "
                "longer than without links.",
            ],
        )
    )
    for name, chunks in _CHUNKS.items():
        for k in values.k:
            for m in values.m:
                jobs = _jobs(values, name, k, m, chunks)
                workers = in_turns(jobs, values.rounds, f"{name} K={k}")
                steps = {
                    job: spread([1000 * s.seconds for s in workers[job].steps])
                    for job in jobs
                }
                table.rows += [_row(job, jobs[0], steps) for job in jobs]


def _jobs(
    values: flags.FlagValues, name: str, k: int, m: int, chunks: int
) -> list[Job]:
    """Without links, with them, and with a schedule that allows for them."""
    without = Job(1, k, m, values.cell_ms, 0, k, name, chunks, remat="never")
    plain = without._replace(link_ms=values.link_ms)
    share = values.link_ms * chunks / (3 * values.cell_ms)
    jobs = [without, plain]
    return jobs if name == "gpipe" else [*jobs, plain._replace(share=share)]


def _bound_ms(job: Job) -> float:
    schedule: Schedule = job.schedule_made()
    cell = job.cell_ms / job.chunks
    return schedule.length(
        lambda task: cell * (2 if task.kind == "backward" else 1), job.link_ms
    )


def _row(job: Job, without: Job, steps: dict) -> dict:
    """A row of the table.

    A link has 2 M V transfers. The first micro-batch's way through all K - 1
    links, and the way back of the last one, nothing can hide.
    """
    longer = steps[job].median - steps[without].median
    both = 2 * job.link_ms  # there and back
    unavoidable = (job.k - 1) * both
    return {
        **job._asdict(),
        "held": job.schedule_made().held()[0],
        "bound_ms": _bound_ms(job),
        **spread_values("step_ms", steps[job]),
        "hidden": 1 - (longer - unavoidable) / (job.m * job.chunks * both)
        if both
        else None,
    }
