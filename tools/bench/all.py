"""The goals of the benchmarks, what is reached now, and what was reported.

Runs the other sub-commands, one after the other, each in a process of its own,
and takes of their tables what there is a goal for. With --quick they measure
few settings, a quarter of an hour in all; without, what they measure by
themselves, an hour and a half. What was reported is in docs/measurements*.md,
of another run, and perhaps of another machine: mostly ratios are compared.

Not among them: `peers`, which needs other libraries, the largest model of
`memory`, and the tables of `plan` that train models.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from tfgpipe.commands import command_line
from tools.report import Column, Report, Table, define_format, progress


class Goal(NamedTuple):
    """What a table should show.

    Attributes:
        what: In words.
        table: Name of the table.
        where: Values of the rows that count; the worst of them does.
        column: Of these rows.
        goal: The number.
        reported: What docs/measurements*.md have; None for nothing.
        is_least: Whether the goal is the least; else it is the most.
    """

    what: str
    table: str
    where: Mapping[str, Any]
    column: str
    goal: float
    reported: float | None
    is_least: bool = False

    def reached(self, tables: Mapping[str, list[dict[str, Any]]]) -> float:
        """The worst number of the rows; none is not a number."""
        found = [
            abs(row[self.column])
            for row in tables.get(self.table, [])
            if self.where.items() <= row.items()
            and row.get(self.column) is not None
        ]
        worst = min if self.is_least else max
        return worst(found, default=math.nan)

    def is_met(self, reached: float) -> bool:
        """Whether a number reaches the goal."""
        return reached >= self.goal if self.is_least else reached <= self.goal


class Run(NamedTuple):
    """A sub-command.

    Attributes:
        command: Its name.
        part: Flags that say which table.
        quick: Flags for few settings.
        goals: What its tables should show.
    """

    command: str
    part: str
    quick: str
    goals: list[Goal]


_NEVER = {
    "gpipe": 1.012,
    "1f1b": 1.009,
    "interleaved": 1.016,
    "zero_bubble": 1.016,
    "zero_bubble_2p": 1.016,
    "zero_bubble_v": 1.026,
    "v_half": 1.025,
    "v_min": 1.028,
    "dualpipe_v": 1.021,
}
RUNS = [
    Run(
        "efficiency",
        "--k=8 --m=16 --cell_ms=40 --remat=never --cells=equal",
        "--rounds=2",
        [
            Goal(
                f"a step by {name}, of its bound",
                "efficiency",
                {"schedule": name},
                "ratio",
                1.05,
                reported,
            )
            for name, reported in _NEVER.items()
        ],
    ),
    Run(
        "throughput",
        "",
        "--rounds=3 --k=1,2 --m=8",
        [
            Goal(
                f"speed-up of {name} by two devices, of ideal",
                f"throughput_{name}",
                {"k": 2, "m": 8},
                "fraction_same_m",
                0.95,
                reported,
                True,
            )
            for name, reported in (("transformer", 0.99), ("amoebanet", 0.88))
        ],
    ),
    Run(
        "overhead",
        "",
        "--rounds=7 --dispatch_m=8,32 --l=48 --k=8 --m=32",
        [
            *(
                Goal(
                    f"one cell of {name}, of plain Keras",
                    "step",
                    {"model": name},
                    "ratio",
                    1.02,
                    reported,
                )
                for name, reported in (
                    ("transformer", 1.026),
                    ("convolutions", 1.006),
                )
            ),
            Goal(
                "microseconds of a task",
                "dispatch",
                {"what": "tasks of gpipe"},
                "us",
                100.0,
                12.0,
            ),
            Goal(
                "a first step, L = 48, K = 8, M = 32, of plain Keras's",
                "tracing",
                {"l": 48, "k": 8, "m": 32},
                "keras_ratio",
                0.5,
                0.34,
            ),
        ],
    ),
    Run(
        "memory",
        "--table=layers,schedules",
        "--k=1",
        [
            Goal(
                "activations with eight micro-batches, of plain Keras's",
                "layers",
                {"method": "pipeline-1"},
                "activations_mib_ratio",
                0.3,
                0.14,
            ),
            Goal(
                "activations by 1f1b, never recomputed, of gpipe's",
                "schedules",
                {"schedule": "1f1b", "remat": "never"},
                "activations_mib_ratio",
                0.5,
                0.20,
            ),
        ],
    ),
    Run(
        "recompute",
        "",
        "--groups=2 --m=8",
        [
            Goal(
                f"{what} of a step that recomputes, of tf.recompute_grad's",
                "recompute",
                {"m": 8},
                column,
                1.05,
                reported,
            )
            for what, column, reported in (
                ("time", "time_ratio", 0.99),
                ("memory", "memory_ratio", 0.47),
            )
        ],
    ),
    Run(
        "replicas",
        "",
        "--r=1,2 --k=2 --rounds=3",
        [
            Goal(
                "a step of two replicas of two devices, bound of it",
                "speed",
                {"r": 2, "k": 2},
                "efficiency",
                0.95,
                0.979,
                True,
            ),
            Goal(
                "weights and slots of a device, two replicas of one",
                "memory",
                {"r": 2, "k": 2},
                "of_one",
                0.505,
                0.50,
            ),
        ],
    ),
    Run(
        "replicas",
        "--part=links --k=2 --m=32",
        "--rounds=1",
        [
            Goal(
                f"of transfers between two workers, hidden by {name}",
                "links",
                {"schedule": name, "share": share},
                "hidden",
                0.9,
                reported,
                True,
            )
            for name, share, reported in (
                ("1f1b", 0.25, 0.95),
                ("interleaved", 0.5, 0.96),
            )
        ],
    ),
    Run(
        "replicas",
        "--part=processes --r=2 --k=2 --rounds=7",
        "",
        [
            Goal(
                "a step of two replicas in two workers, bound of it",
                "processes",
                {"processes": 2},
                "efficiency",
                0.95,
                0.955,
                True,
            )
        ],
    ),
    Run(
        "plan",
        "--table=partition",
        "--cases=200",
        [
            Goal(
                "the largest cell of a cut, of the best",
                "partition",
                {"method": "tfgpipe"},
                "worst",
                1.0,
                1.0,
            )
        ],
    ),
    Run(
        "plan",
        "--table=waiting",
        "--rounds=2",
        [
            Goal(
                "error of a predicted step of waiting cells",
                "waiting",
                {},
                "error",
                0.1,
                0.008,
            )
        ],
    ),
]
_COLUMNS = [
    Column("command", "sub-command"),
    Column("what", "what"),
    Column("goal", "goal"),
    Column("reached", "reached", ".3f"),
    Column("reported", "reported", ".3f"),
    Column("met", ""),
]
FLAGS = command_line.new_flags()
define_format(FLAGS)
flags.DEFINE_boolean("quick", False, "Measure few settings.", flag_values=FLAGS)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures; a goal without a number is missed.

    Args:
        values: The flags.
        report: Gets one table.
    """
    table = report.add(
        Table(
            "goals",
            "Goals, what was reached now, and what was reported",
            _COLUMNS,
        )
    )
    for one in progress(RUNS, "all"):
        words = f"{one.part} {one.quick if values.quick else ''}".split()
        tables, problem = _tables(one.command, words)
        if problem:
            table.notes.append(f"{one.command}: {problem}")
        for goal in one.goals:
            reached = goal.reached(tables)
            table.rows.append(
                {
                    "command": one.command,
                    "what": goal.what,
                    "goal": f"{'>=' if goal.is_least else '<='} {goal.goal:g}",
                    "reached": None if math.isnan(reached) else reached,
                    "reported": goal.reported,
                    "met": "" if goal.is_met(reached) else "missed",
                }
            )


def _tables(
    command: str, words: list[str]
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """The rows of a sub-command's tables by their names, and what failed."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", command, "--format=json", *words],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or ["it failed"])[-1]
    found = json.loads(done.stdout)["tables"]
    return {table["name"]: table["rows"] for table in found}, ""
