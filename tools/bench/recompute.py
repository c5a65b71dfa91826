"""Recomputation in a `GPipe` beside `tf.recompute_grad` in plain Keras.

Both cut the same Transformer blocks into the same groups, and on one device
keep the inputs of the groups of a mini-batch: plain Keras by
`tf.recompute_grad` around each, a `GPipe` of one cell by `remat_groups`, with
remat="always". Beside them is plain Keras that keeps everything, and a `GPipe`
with micro-batches.

A second table has a `GPipe` of one cell by each rule of `remat`: what it costs
in time, and what it saves of the memory of a cell that keeps everything. A
third has fewer blocks and a head of many words, which goes in parts.

Every way is a process of its own, on one core. They take turns, a step at a
time, so that all of them see the same machine. Memory is the peak of a step
above what the process rests at, in a run of its own in which freed memory goes
back at once.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.schedules import REMAT, checked_rule, rule_of
from tools.bench.flags import define_choices, define_numbers, new_flags
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
define_choices(
    FLAGS,
    "table",
    ["groups", "rules", "heads"],
    ["groups", "rules", "heads"],
    "Beside `tf.recompute_grad`; by the rule of `remat`; by `head_parts`.",
)
define_numbers(FLAGS, "groups", [2, 4, 8], "Groups of blocks.")
define_numbers(FLAGS, "m", [1, 8], "Micro-batches of a `GPipe`.")
flags.DEFINE_list(
    "rules",
    ["never", "0.7", "0.4", "0.2", "except_last", "always"],
    "Rules of `remat`; without groups, with the most micro-batches.",
    flag_values=FLAGS,
)
flags.DEFINE_integer("words", 32000, "For table `heads`.", 2, flag_values=FLAGS)
define_numbers(FLAGS, "head_parts", [1, 2, 4], "For table `heads`.")
flags.DEFINE_integer(
    "head_layers", 2, "Transformer blocks for it.", 1, flag_values=FLAGS
)

# With the graph optimiser on, `tf.recompute_grad` saves next to no memory: see
# docs/measurements_cells.md.
_BASE = "recompute_grad, as written"


def _columns(base: str) -> list[Column]:
    """What a way takes, and that beside a base."""
    return [
        Column("m", "M"),
        *spread_columns("step_ms", "step ms", ".0f"),
        Column("time_ratio", f"/ {base}", ".3f"),
        Column("activations_mib", "activations MiB", ".1f"),
        Column("memory_ratio", f"/ {base}", ".2f"),
        Column("others", "others", ".0%"),
    ]


COLUMNS = [
    Column("way", "way"),
    Column("groups", "groups"),
    *_columns("recompute_grad"),
]
RULE_COLUMNS = [Column("rule", "remat"), *_columns("never")]
HEAD_COLUMNS = [
    Column("head_parts", "head_parts"),
    Column("rule", "remat"),
    *_columns("1 part"),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    _check(values)
    for name in dict.fromkeys(values.table):
        {"groups": _groups, "rules": _rules, "heads": _heads}[name](
            values, report
        )


def _groups(values: flags.FlagValues, report: Report) -> None:
    table = _table(
        "recompute",
        COLUMNS,
        ["/ recompute_grad: the same groups in plain Keras."],
        values,
        report,
    )
    jobs = _jobs(values)
    measured = _measured(jobs, values.rounds)
    table.rows += [_row(job, _same_groups(job), *measured) for job in jobs]


def _rules(values: flags.FlagValues, report: Report) -> None:
    table = _table(
        "rules",
        RULE_COLUMNS,
        ['a number: the share of what "never" keeps that is kept'],
        values,
        report,
    )
    jobs = _jobs_by_rule(values)
    measured = _measured(jobs, values.rounds)
    base = next((job for job in jobs if job.remat == "never"), None)
    table.rows += [
        {**_row(job, base, *measured), "rule": str(job.remat)} for job in jobs
    ]


def _heads(values: flags.FlagValues, report: Report) -> None:
    table = _table(
        "heads",
        HEAD_COLUMNS,
        [f"with a head of {values.words:,} words"],
        values,
        report,
        values.head_layers,
    )
    size = values.width, values.sequence, values.batch_size
    first = Job(
        "gpipe",
        1,
        max(values.m),
        values.head_layers,
        *size,
        REMAT[0],
        values.words,
    )
    jobs = [
        first._replace(head_parts=n) for n in dict.fromkeys(values.head_parts)
    ]
    measured = _measured(jobs, values.rounds)
    base = next((job for job in jobs if job.head_parts == 1), None)
    table.rows += [
        {**_row(job, base, *measured), "rule": str(job.remat)} for job in jobs
    ]


def _table(
    name: str,
    columns: list[Column],
    notes: list[str],
    values: flags.FlagValues,
    report: Report,
    num_layers: int | None = None,
) -> Table:
    """An empty table, which the report has from now on."""
    return report.add(
        Table(
            name,
            f"{num_layers or values.layers} Transformer blocks of "
            f"{values.width} units on "
            f"one core, {values.sequence} positions, batches of "
            f"{values.batch_size}: median and quartiles of {values.rounds} "
            "steps",
            columns,
            notes=[
                *notes,
                "activations: and gradients; the peak of a step.",
                "others: share of the machine that other processes used",
            ],
        )
    )


def _measured(
    jobs: list[Job], rounds: int
) -> tuple[dict[Job, Worker], dict[Job, float]]:
    return in_turns(jobs, rounds, "steps"), measure_memory(jobs, "memory")


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
    try:
        for rule in values.rules:
            checked_rule(rule_of(rule))
    except ValueError as error:
        raise BadFlags(f"--rules: {error}") from error


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


def _jobs_by_rule(values: flags.FlagValues) -> list[Job]:
    size = values.layers, values.width, values.sequence, values.batch_size
    rules = dict.fromkeys(map(rule_of, values.rules))
    return [Job("gpipe", 1, max(values.m), *size, rule) for rule in rules]


def _same_groups(job: Job) -> Job | None:
    return None if job.way == "keras" else job._replace(way=_BASE, m=1)


def _row(
    job: Job,
    base: Job | None,
    workers: dict[Job, Worker],
    memory: dict[Job, float],
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
    if base is not None:
        theirs = spread([s.seconds for s in workers[base].steps])
        row["time_ratio"] = step.median / theirs.median
        row["memory_ratio"] = memory[job] / memory[base]
    return row
