"""What the planner predicts, beside what is measured.

Tables: `steps`, steps from layers that were measured one by one, and the cut by
these beside that by FLOPs; `grid`, the plan beside the best of all settings;
`waiting`, steps of cells that wait, on up to 16 devices; `one_device`, steps of
one device, for each number of micro-batches; each of these four takes a run of
its own; `memory`, bytes of an accelerator beside
worker processes whose memory is measured; `paper`, the paper's tables 1 and 2
from FLOPs and bytes alone; `partition`, the cut of random costs beside the best
one and the cuts of Lingvo and torchgpipe.

What Lingvo does is told in words: layer i goes into cell floor(K c / C), where
c is the cost of the layers up to it, and C of all. torchgpipe's own function is
asked if the package is there (`pip install --no-deps torchgpipe`; it needs no
torch for this).
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import random
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.partition import partition
from tools.bench import (
    plan_grid,
    plan_memory,
    plan_one_device,
    plan_paper,
    plan_steps,
)
from tools.bench.flags import define_choices, new_flags
from tools.report import Column, Report, Table

FLAGS = new_flags(rounds=5)
define_choices(
    FLAGS,
    "table",
    ["partition", "paper", "memory", "steps"],
    [
        "partition",
        "paper",
        "memory",
        "steps",
        "grid",
        "waiting",
        "one_device",
    ],
    "What to compare.",
)
flags.DEFINE_integer(
    "cases", 1000, "Random lists of costs.", 1, flag_values=FLAGS
)
flags.DEFINE_float(
    "seconds",
    30.0,
    "For which the layers of a model are measured.",
    0.1,
    flag_values=FLAGS,
)
flags.DEFINE_integer("seed", 0, "Of the lists.", flag_values=FLAGS)

_PARTITION = [
    Column("method", "cut"),
    Column("mean", "largest / best, mean", ".4f"),
    Column("worst", "worst", ".3f"),
    Column("best_share", "as good as the best", ".1%"),
    Column("endless", "without an end", "d"),
]
_PATIENCE_SECONDS = 2


def run(values: flags.FlagValues, report: Report) -> None:
    """Makes the tables that the flags ask for."""
    makers: dict[str, Callable[[], Iterable[Table]]] = {
        "partition": lambda: [_partition(values.cases, values.seed)],
        "paper": plan_paper.tables,
        "memory": lambda: [plan_memory.table(values.rounds)],
        "waiting": lambda: plan_steps.waiting(values.rounds),
        "grid": lambda: [plan_grid.table(values.rounds, values.seconds)],
        "steps": lambda: plan_steps.tables(values.rounds, values.seconds),
        "one_device": lambda: [
            plan_one_device.table(values.rounds, values.seconds)
        ],
    }
    if len({"steps", "grid", "waiting", "one_device"} & set(values.table)) > 1:
        raise BadFlags(
            "--table must have one of `steps`, `grid`, `waiting` and "
            "`one_device`: the CPU can be split once. Received: "
            f"--table={','.join(values.table)}."
        )
    for name in dict.fromkeys(values.table):
        for table in makers[name]():
            report.add(table)


def _partition(cases: int, seed: int) -> Table:
    """The largest cell of each way to cut, relative to the best."""
    found: dict[str, list[float]] = {}
    endless: collections.Counter[str] = collections.Counter()
    rng = random.Random(seed)
    ways = _ways()
    for _ in range(cases):
        count = rng.randint(3, 14)
        k = rng.randint(2, min(6, count))
        top = rng.choice([3, 20, 1000])
        costs = [rng.randint(1, top) for _ in range(count)]
        best = _exhaustive(costs, k)
        for name, way in ways.items():
            try:
                with _patience():
                    largest = max(map(sum, way(costs, k)))
            except TimeoutError:
                endless[name] += 1
            else:
                found.setdefault(name, []).append(largest / best)
    table = Table(
        "partition",
        f"Largest cell of {cases:,} random lists of costs, 3 to 14 layers in 2 "
        "to 6 cells, relative to the best of all cuts; what has not ended "
        f"after {_PATIENCE_SECONDS} s does not count",
        _PARTITION,
    )
    for name, ratios in found.items():
        table.rows.append(
            {
                "method": name,
                "mean": statistics.mean(ratios),
                "worst": max(ratios),
                "best_share": sum(r == 1 for r in ratios) / len(ratios),
                "endless": endless[name],
            }
        )
    return table


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Raises `TimeoutError` in what takes longer than some seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _exhaustive(costs: Sequence[int], k: int) -> int:
    """The smallest largest cell of all cuts."""
    ends = np.cumsum([0, *costs])
    return min(
        max(np.diff(ends[[0, *places, len(costs)]]))
        for places in itertools.combinations(range(1, len(costs)), k - 1)
    )


def _ways() -> dict[str, Callable[[list[int], int], list[list[int]]]]:
    """Functions that cut costs into cells."""
    ways = {"tfgpipe": _ours, "Lingvo's rule": _by_histogram}
    solve = _torchgpipe()
    if solve is not None:
        ways["torchgpipe"] = solve
    return ways


def _ours(costs: list[int], k: int) -> list[list[int]]:
    rest = iter(costs)
    return [[*itertools.islice(rest, n)] for n in partition(costs, k)]


def _by_histogram(costs: list[int], k: int) -> list[list[int]]:
    cells: list[list[int]] = [[] for _ in range(k)]
    total, so_far = sum(costs), 0
    for cost in costs:
        so_far += cost
        cells[min(k * so_far // total, k - 1)].append(cost)
    return cells


def _torchgpipe() -> Any:
    """Its function, without the package around it; None if it is not there."""
    package = importlib.util.find_spec("torchgpipe")
    if package is None or package.origin is None:
        return None
    path = package.origin.replace("__init__.py", "balance/blockpartition.py")
    spec = importlib.util.spec_from_file_location("blockpartition", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solve
