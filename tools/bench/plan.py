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

import keras
import numpy as np
from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.partition import partition
from tfgpipe.plans import Prediction, Setting, predict
from tfgpipe.plans import sized as sized_model
from tfgpipe.sequence import source_of
from tools.bench import memory_trial, plan_paper, plan_steps
from tools.bench.memory_trial import Job, Size, cut_of, layers_of, optimizer_of
from tools.bench.plan_steps import compared, compared_columns, with_errors
from tools.flags import define, new_flags
from tools.report import Report, Table, columns, progress
from tools.sizes.model_size import by_cost

FLAGS = new_flags(rounds=5)
define(
    FLAGS,
    table=(
        ["partition", "paper", "memory", "steps"],
        "What to compare.",
        [
            "partition",
            "paper",
            "memory",
            "steps",
            "grid",
            "waiting",
            "one_device",
        ],
    ),
    cases=(1000, "Random lists of costs."),
    seconds=(30.0, "For which the layers of a model are measured.", 0.1),
    seed=(0, "Of the lists.", None),
)

_PARTITION = columns(
    "method: cut | mean: largest / best, mean: .4f | worst: worst: .3f | "
    "best_share: as good as the best: .1% | endless: without an end: d"
)
_PATIENCE_SECONDS = 2


def run(values: flags.FlagValues, report: Report) -> None:
    """Makes the tables that the flags ask for."""
    makers: dict[str, Callable[[], Iterable[Table]]] = {
        "partition": lambda: [_partition(values.cases, values.seed)],
        "paper": plan_paper.tables,
        "memory": lambda: [_memory(values.rounds)],
        "waiting": lambda: plan_steps.waiting(values.rounds),
        "grid": lambda: [plan_steps.grid(values.rounds, values.seconds)],
        "steps": lambda: plan_steps.tables(values.rounds, values.seconds),
        "one_device": lambda: [
            plan_steps.one_device(values.rounds, values.seconds)
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


_MIB = 2**20
# Activations outweigh weights, or weights outweigh activations.
_WIDE = Size(width=512, sequence=16, batch_size=32)
_LONG = Size(sequence=128, batch_size=64)
_FEW = Size(batch_size=64)
JOBS = [
    Job(Size(), 4, 2, 4, "gpipe", "never"),
    Job(Size(), 4, 2, 8, "gpipe", "except_last"),
    Job(Size(), 8, 2, 8, "gpipe", "always"),
    Job(Size(), 4, 2, 8, "1f1b", "never"),
    Job(Size(), 8, 2, 8, "1f1b", "except_last"),
    Job(Size(), 4, 4, 16, "1f1b", "always"),
    Job(Size(), 8, 4, 8, "1f1b", "never"),
    Job(Size(), 8, 2, 4, "zero_bubble", "except_last"),
    Job(Size(), 4, 2, 8, "zero_bubble", "never"),
    Job(Size(), 4, 2, 8, "interleaved", "except_last", chunks=2),
    Job(Size(), 8, 2, 8, "interleaved", "never", chunks=2),
    Job(Size(), 8, 2, 4, "gpipe", "always", remat_groups=2),
    Job(Size(), 8, 1, 8, "gpipe", "except_last"),
    Job(Size(), 8, 1, 4, "gpipe", "always", remat_groups=4),
    Job(_LONG, 4, 2, 4, "gpipe", "except_last"),
    Job(_LONG, 4, 2, 8, "1f1b", "never"),
    Job(_WIDE, 4, 2, 4, "gpipe", "never"),
    Job(_WIDE, 4, 2, 4, "1f1b", "always"),
    Job(_WIDE._replace(optimizer="sgd"), 4, 2, 8, "zero_bubble", "never"),
    Job(_WIDE, 4, 1, 1, "gpipe", "never"),
    # Shares, heads, and the host.
    Job(Size(), 4, 2, 8, "gpipe", 0.4),
    Job(Size(), 4, 2, 8, "1f1b", 0.7),
    Job(_FEW, 4, 2, 8, "gpipe", "except_last", words=8000),
    Job(_FEW, 4, 2, 8, "gpipe", "except_last", words=8000, head_parts=4),
    Job(_FEW, 4, 2, 8, "1f1b", "always", words=8000, head_parts=2),
    Job(Size(), 4, 2, 8, "gpipe", "offload", is_on_host=True),
    Job(_LONG, 8, 2, 16, "1f1b", "always", is_on_host=True),
    Job(_WIDE, 8, 2, 4, "breadth_first", "always", chunks=4, is_on_host=True),
]
_MEMORY_COLUMNS = [
    *columns(
        "schedule | remat | width | layers: L | k: K | m: M | groups | words | "
        "head_parts | weights_on: weights on | device"
    ),
    *compared_columns("MiB"),
]


def _memory(rounds: int) -> Table:
    """Every setting, a line an accelerator; the errors below."""
    found = Table(
        "memory",
        f"Memory of accelerators that are processes, {len(JOBS)} settings: "
        "weights, slots, gradients and activations at the peak of a step",
        _MEMORY_COLUMNS,
    )
    for job in progress(JOBS, "memory"):
        outcome = memory_trial.run(job._replace(num_steps=rounds))
        prediction = predicted(job)
        for device, use in enumerate(outcome.uses):
            measured = use.held + use.gradients + use.activations
            expected = prediction.memory[device].total / _MIB
            found.rows.append(
                {
                    "schedule": job.schedule,
                    "remat": job.remat,
                    "width": job.size.width,
                    "layers": job.num_layers,
                    "k": job.k,
                    "m": job.m,
                    "groups": job.remat_groups,
                    "words": job.words or 1,
                    "head_parts": job.head_parts,
                    "weights_on": _place(job),
                    "device": device,
                    **compared("MiB", measured, expected),
                }
            )
    return with_errors(found, "accelerators")


def predicted(job: Job) -> Prediction:
    """What the planner says of a trial."""
    source = source_of(layers_of(job))
    optimizer = keras.optimizers.get(optimizer_of(job))
    model = sized_model(source, None, optimizer)
    # Seconds decide nothing but how a cell falls into groups.
    workload = by_cost(model, job.size.batch_size / job.m)
    cut = tuple(source.steps_per_cell(cut_of(job)))
    rules = tuple(itertools.repeat(job.remat, len(cut)))
    setting = Setting(
        1,
        job.k,
        cut,
        job.m,
        job.schedule,
        rules,
        job.remat_groups or 1,
        job.head_parts,
        _place(job),
    )
    return predict(workload, setting, None)


def _place(job: Job) -> str:
    """Where the weights are."""
    return "host" if job.is_on_host else "devices"
