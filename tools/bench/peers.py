"""The same work in tfgpipe and in other libraries, in the same run.

Work A is eight Transformer blocks, B twelve convolutions, C cells that only
wait. All peers get the same weights and data. One accelerator is one thread,
K = 1 is pinned to one core. The workers take turns, a step at a time; steps
during which other processes used the machine are repeated. Memory is the peak
of warm steps above the resting process, all processes of a peer together, in a
run of its own in which freed memory goes back at once. TensorFlow's oneDNN is
on for times, as it always is in torch, and off for memory, as it keeps what it
has had. The programs are in `tools.bench.peer_programs`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tools.bench.flags import define_choices, define_numbers, new_flags
from tools.bench.memory_worker import EXACT_MEMORY
from tools.bench.peer_libraries import (
    INSTALL,
    PEERS,
    Configuration,
    is_possible,
    not_installed,
    start,
)
from tools.bench.peer_programs.work import BACKWARD_SECONDS, FORWARD_SECONDS
from tools.bench.step_worker import Worker, least_disturbed, median
from tools.report import (
    Column,
    Report,
    Table,
    progress,
    spread,
    spread_columns,
    spread_values,
)

COLUMNS = [
    Column("work", "work"),
    Column("remat", "remat"),
    Column("m", "M"),
    Column("library", "library"),
    Column("k", "K"),
    *spread_columns("seconds", "s/step", ".3f"),
    Column("speedup", "speed-up", ".2f"),
    Column("of_ideal", "/ ideal", ".2f"),
    Column("mib", "peak MiB", ".0f"),
    Column("loss_difference", "loss differs", ".0e"),
    Column("others", "others", ".0%"),
]
# Torch has oneDNN in any case; TensorFlow leaves it out on some processors.
_ALIKE = {"TF_ENABLE_ONEDNN_OPTS": "1"}
_START_SECONDS = 300.0
_CALM = 0.04  # share of the machine that others may have in a step

FLAGS = new_flags(rounds=7)
flags.DEFINE_string(
    "lingvo_python",
    os.environ.get("PEERS_LINGVO_PY", sys.executable),
    "Python that has Lingvo. Default: $PEERS_LINGVO_PY, else this one.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "torch_python",
    os.environ.get("PEERS_TORCH_PY", sys.executable),
    "Python that has torch and torchgpipe. Default: $PEERS_TORCH_PY, else "
    "this one.",
    flag_values=FLAGS,
)
define_choices(FLAGS, "work", ["A", "B", "C"], "ABC", "What to compute.")
define_choices(FLAGS, "peer", PEERS, PEERS, "Libraries and schedules.")
define_choices(
    FLAGS, "remat", ["on", "off"], ["on", "off"], "Re-materialisation."
)
define_numbers(FLAGS, "m", [8], "Micro-batches, of work A and B.")
flags.DEFINE_boolean(
    "time", True, "Whether to measure time.", flag_values=FLAGS
)
flags.DEFINE_boolean(
    "memory", True, "Whether to measure memory.", flag_values=FLAGS
)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures every group of configurations that take turns.

    Args:
        values: The flags.
        report: Gets one table.
    """
    _check(values)
    pythons = _pythons(values)
    missing = not_installed(values.peer, pythons)
    table = Table("peers", __doc__.partition("\n")[0], COLUMNS)
    table.notes += [
        f"{name}: not installed: {INSTALL[PEERS[name].library]}"
        for name in missing
    ]
    report.add(table)
    peers = [name for name in values.peer if name not in missing]
    for group in progress(list(groups(values, peers)), "peers"):
        rows = {c: c.row() for c in group}
        if values.time:
            _measure_time(rows, values.rounds, pythons, table.notes)
        if values.memory and group[0].work != "C":
            _measure_memory(rows, pythons, table.notes)
        table.rows += [row for row in rows.values() if len(row) > 5]
    _explain(table)


def _check(values: flags.FlagValues) -> None:
    if not (values.time or values.memory):
        raise BadFlags("--notime and --nomemory leave nothing to measure.")


def _pythons(values: flags.FlagValues) -> dict[str, str | None]:
    return {
        "tfgpipe": sys.executable,
        "lingvo": values.lingvo_python,
        "torch": values.torch_python,
    }


def groups(
    values: flags.FlagValues, peers: Sequence[str]
) -> Iterator[list[Configuration]]:
    """The configurations that are compared with each other."""
    for work in values.work:
        if work == "C":
            cells = [Configuration(p, "C", 8, 32, True) for p in peers]
            yield [c for c in cells if is_possible(c)]
            continue
        for remat in values.remat:
            for m in values.m:
                found = [
                    Configuration(peer, work, k, m, remat == "on")
                    for peer in peers
                    for k in (1, 2)
                    if k == 2 or peer == PEERS[peer].baseline
                ]
                yield [c for c in found if is_possible(c)]


def _measure_time(
    rows: dict[Configuration, dict[str, Any]],
    rounds: int,
    pythons: dict[str, str | None],
    notes: list[str],
) -> None:
    """Adds the columns of time to the rows."""
    workers: dict[Configuration, Worker] = {}
    try:
        for c in rows:
            while sum(w.is_starting for w in workers.values()) >= 2:
                time.sleep(0.2)
            workers[c] = start(c, pythons, _ALIKE, is_pinned=c.k == 1)
        for c, worker in workers.items():
            if not worker.wait(_START_SECONDS):
                notes.append(f"{c.row()}: does not run: {worker.why_not()}")
        ready = {c: w for c, w in workers.items() if w.ready}
        _take_turns(list(ready.values()), rounds)
        for c in ready:
            rows[c] |= _times(c, ready, rounds)
    finally:
        for worker in workers.values():
            worker.close()


def _take_turns(workers: list[Worker], rounds: int) -> None:
    """Steps of all workers in turn, until each has enough calm ones."""
    for _ in range(3 * rounds):
        for worker in workers:
            calm = sum(step.others <= _CALM for step in worker.steps)
            if calm < rounds:
                worker.step()


def _times(
    c: Configuration, ready: dict[Configuration, Worker], rounds: int
) -> dict[str, Any]:
    """The columns of time of one configuration."""
    steps = least_disturbed(ready[c].steps, rounds)
    seconds = median(steps)
    row = spread_values("seconds", spread([s.seconds for s in steps]))
    row["others"] = max(step.others for step in steps)
    row["version"] = ready[c].ready.get("version", "")
    # The losses of different work cannot be compared; the first is tfgpipe's.
    losses = [ready[r].ready["losses"] for r in (next(iter(ready)), c)]
    if c.work == "C":
        cell = 2 * FORWARD_SECONDS + BACKWARD_SECONDS  # recomputed once
        row["of_ideal"] = (c.m + c.k - 1) * cell / seconds
        return row
    row["loss_difference"] = max(abs(a - b) / abs(a) for a, b in zip(*losses))
    baseline = ready.get(c._replace(peer=PEERS[c.peer].baseline, k=1))
    if baseline is not None:
        alone = median(least_disturbed(baseline.steps, rounds))
        row["speedup"] = alone / seconds
        row["of_ideal"] = row["speedup"] * (c.m + c.k - 1) / (c.k * c.m)
    return row


def _measure_memory(
    rows: dict[Configuration, dict[str, Any]],
    pythons: dict[str, str | None],
    notes: list[str],
) -> None:
    """Adds the column of memory to the rows."""
    gradients = 0.0  # MiB; the same for all
    for c, row in rows.items():
        worker = start(c, pythons, EXACT_MEMORY)
        try:
            if worker.wait(_START_SECONDS):
                row["mib"] = worker.ask("mem")["mib"]
                gradients = _gradient_mib(worker, gradients)
                if PEERS[c.peer].keeps_gradients:
                    row["mib"] += gradients
            else:
                notes.append(f"{row}: no memory: {worker.why_not()}")
        finally:
            worker.close()


def _gradient_mib(worker: Worker, known: float) -> float:
    """Size of all gradients; the workers of this package say it."""
    size = worker.ready.get("parameter_bytes")
    return known if size is None else size / 2**20


def _explain(table: Table) -> None:
    """Says below the table what its columns mean."""
    table.notes += [
        "speed-up: over the own K = 1 on one core, with the same M and remat.",
        "/ ideal: speed-up over K M / (M + K - 1); of work C the time (M + K "
        "- 1) 80 ms over the step's.",
        "peak MiB: of warm steps: activations and gradients, no weights. The "
        "gradients that torch's processes hold between steps are added.",
        "loss differs: largest relative difference of the first three losses "
        "to those of the first library.",
        "others: share of the machine other processes had in a step, at most.",
    ]
