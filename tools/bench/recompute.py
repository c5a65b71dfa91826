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
from tools.bench.step_worker import (
    Worker,
    in_turns,
    measure_memory,
    median,
    timed_row,
)
from tools.bench.training_worker import Job
from tools.flags import define, new_flags
from tools.report import Column, Report, Table, columns

FLAGS = new_flags(rounds=9)
for _name, _default, _meaning in (
    ("layers", 8, "Transformer blocks."),
    ("width", 128, "Units of a block; 4 times as many inside."),
    ("sequence", 64, "Positions in an example."),
    ("batch_size", 64, "Examples in a mini-batch."),
):
    flags.DEFINE_integer(_name, _default, _meaning, 1, flag_values=FLAGS)
define(
    FLAGS,
    table=(
        ["groups", "rules", "heads"],
        "Beside `tf.recompute_grad`; by the rule of `remat`; by `head_parts`.",
        ["groups", "rules", "heads"],
    ),
    groups=([2, 4, 8], "Groups of blocks."),
    m=([1, 8], "Micro-batches of a `GPipe`."),
    rules=(
        ["never", "0.7", "0.4", "0.2", "except_last", "always"],
        "Rules of `remat`; without groups, with the most micro-batches.",
    ),
    words=(32000, "For table `heads`.", 2),
    head_parts=([1, 2, 4], "For table `heads`."),
    head_layers=(2, "Transformer blocks for it."),
)

# With the graph optimiser on, `tf.recompute_grad` saves next to no memory: see
# docs/measurements.md.
_BASE = "recompute_grad, as written"


def _columns(base: str) -> list[Column]:
    """What a way takes, and that beside a base."""
    return [
        *columns("m: M | *step_ms: step ms: .0f"),
        Column("time_ratio", f"/ {base}", ".3f"),
        *columns("activations_mib: activations MiB: .1f"),
        Column("memory_ratio", f"/ {base}", ".2f"),
        *columns("others: others: .0%"),
    ]


COLUMNS = [
    *columns("way | groups"),
    *_columns("recompute_grad"),
]
RULE_COLUMNS = [Column("rule", "remat"), *_columns("never")]
HEAD_COLUMNS = [
    *columns("head_parts | rule: remat"),
    *_columns("1 part"),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    _check(values)
    makers = {"groups": _groups, "rules": _rules, "heads": _heads}
    for name in dict.fromkeys(values.table):
        makers[name](values, report)


def _groups(values: flags.FlagValues, report: Report) -> None:
    first = _job(values, values.layers)
    jobs = [first._replace(way="keras", groups=1)]
    for groups in dict.fromkeys(values.groups):
        grouped = first._replace(groups=groups)
        ways = [grouped._replace(way=w) for w in ("recompute_grad", _BASE)]
        jobs += [
            *ways,
            *(grouped._replace(m=m) for m in dict.fromkeys(values.m)),
        ]
    note = "/ recompute_grad: the same groups in plain Keras."
    bases = {
        job: None if job.way == "keras" else job._replace(way=_BASE, m=1)
        for job in jobs
    }
    _measure("recompute", COLUMNS, [note], bases, values, report)


def _rules(values: flags.FlagValues, report: Report) -> None:
    first = _job(values, values.layers)._replace(groups=1, m=max(values.m))
    jobs = [
        first._replace(remat=rule)
        for rule in dict.fromkeys(map(rule_of, values.rules))
    ]
    never = first._replace(remat="never")
    bases = dict.fromkeys(jobs, never if never in jobs else None)
    note = 'a number: the share of what "never" keeps that is kept'
    _measure("rules", RULE_COLUMNS, [note], bases, values, report)


def _heads(values: flags.FlagValues, report: Report) -> None:
    first = _job(values, values.head_layers)._replace(
        groups=1, m=max(values.m), remat=REMAT[0], words=values.words
    )
    jobs = [
        first._replace(head_parts=n) for n in dict.fromkeys(values.head_parts)
    ]
    bases = dict.fromkeys(jobs, first if first in jobs else None)
    note = f"with a head of {values.words:,} words"
    _measure("heads", HEAD_COLUMNS, [note], bases, values, report)


def _job(values: flags.FlagValues, num_layers: int) -> Job:
    return Job(
        "blocks",
        "gpipe",
        values.batch_size,
        layers=num_layers,
        width=values.width,
        sequence=values.sequence,
    )


def _measure(
    name: str,
    columns: list[Column],
    notes: list[str],
    bases: dict[Job, Job | None],
    values: flags.FlagValues,
    report: Report,
) -> None:
    """Adds a table of jobs, each beside another one."""
    jobs = list(bases)
    table = report.add(
        Table(
            name,
            f"{jobs[0].layers} Transformer blocks of {values.width} units on "
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
    workers = in_turns(jobs, values.rounds, "steps")
    memory = measure_memory(jobs, "memory")
    table.rows += [
        _row(job, base, workers, memory) for job, base in bases.items()
    ]


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


def _row(
    job: Job,
    base: Job | None,
    workers: dict[Job, Worker],
    memory: dict[Job, float],
) -> dict[str, Any]:
    row = {
        **timed_row(job, workers),
        "way": {"keras": "Keras, all kept"}.get(job.way, job.way),
        "rule": str(job.remat),
        "activations_mib": memory[job],
    }
    if base is not None:
        steps = workers[job].steps, workers[base].steps
        row["time_ratio"] = median(steps[0]) / median(steps[1])
        row["memory_ratio"] = memory[job] / memory[base]
    return row
