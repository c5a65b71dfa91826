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
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tools.bench.memory_worker import EXACT_MEMORY
from tools.bench.peer_programs.protocol import Order
from tools.bench.peer_programs.work import BACKWARD_SECONDS, FORWARD_SECONDS
from tools.bench.step_worker import Worker, least_disturbed, median
from tools.flags import define, new_flags
from tools.report import Report, Table, columns, progress, spread, spread_values

COLUMNS = columns(
    "work | remat | m: M | library | k: K | *seconds: s/step: .3f | "
    "speedup: speed-up: .2f | of_ideal: / ideal: .2f | mib: peak MiB: .0f | "
    "loss_difference: loss differs: .0e | others: others: .0%"
)
# Torch has oneDNN in any case; TensorFlow leaves it out on some processors.
_ALIKE = {"TF_ENABLE_ONEDNN_OPTS": "1"}
_START_SECONDS = 300.0
_CALM = 0.04  # share of the machine that others may have in a step


class Peer(NamedTuple):
    """A library, or a way to use it.

    Attributes:
        library: Its module, and the name of its program.
        python: Which interpreter: "tfgpipe", "lingvo" or "torch".
        variant: What the program is told.
        baseline: The peer whose K = 1 it is compared with.
        works: The work it can do.
        keeps_gradients: Whether the resting process still holds them.
    """

    library: str
    python: str
    variant: str
    baseline: str
    works: str = "ABC"
    keeps_gradients: bool = False


def _ours(variant: str, works: str = "ABC", baseline: str = "gpipe") -> Peer:
    return Peer("tfgpipe", "tfgpipe", variant, baseline, works)


def _torch(variant: str) -> Peer:
    return Peer("torch", "torch", variant, "torch-gpipe", keeps_gradients=True)


def _torch_compiled(schedule: str) -> Peer:
    return _torch(f"{schedule},compile=yes")._replace(
        baseline="torch-gpipe-compiled", works="AB"
    )


PEERS = {
    "gpipe": _ours("gpipe"),
    "gpipe-always": _ours("gpipe,remat=always"),
    "gpipe-cells": _ours("gpipe,remat_groups=1"),
    "gpipe-share": _ours("gpipe,remat=0.2", "AB"),
    "1f1b": _ours("1f1b"),
    "1f1b-cells": _ours("1f1b,remat_groups=1"),
    "1f1b-share": _ours("1f1b,remat=0.2", "AB"),
    "interleaved": _ours("interleaved", "AB"),
    "zero_bubble": _ours("zero_bubble"),
    "gpipe-xla": _ours("gpipe,jit_compile=yes", "AB", "gpipe-xla"),
    "1f1b-xla": _ours("1f1b,jit_compile=yes", "AB", "gpipe-xla"),
    "zero_bubble-xla": _ours("zero_bubble,jit_compile=yes", "AB", "gpipe-xla"),
    "gpipe-keras": _ours("gpipe,layers=keras", "A", "gpipe-keras"),
    "lingvo": Peer("lingvo", "lingvo", "gpipe", "lingvo"),
    "torchgpipe": Peer(
        "torchgpipe",
        "torch",
        "gpipe",
        "torchgpipe",
        works="AB",  # C takes it minutes a step
        keeps_gradients=True,
    ),
    "torch-gpipe": _torch("gpipe"),
    "torch-1f1b": _torch("1f1b"),
    "torch-interleaved": _torch("interleaved"),
    "torch-gpipe-selective": _torch("gpipe,checkpoint=selective"),
    "torch-1f1b-selective": _torch("1f1b,checkpoint=selective"),
    "torch-gpipe-compiled": _torch_compiled("gpipe"),
    "torch-1f1b-compiled": _torch_compiled("1f1b"),
    "torch-interleaved-compiled": _torch_compiled("interleaved"),
}


FLAGS = new_flags(rounds=7)
define(
    FLAGS,
    lingvo_python=(
        os.environ.get("PEERS_LINGVO_PY", sys.executable),
        "Python that has Lingvo. Default: $PEERS_LINGVO_PY, else this one.",
    ),
    torch_python=(
        os.environ.get("PEERS_TORCH_PY", sys.executable),
        "Python that has torch and torchgpipe. Default: $PEERS_TORCH_PY, else "
        "this one.",
    ),
    work=(["A", "B", "C"], "What to compute.", "ABC"),
    peer=(PEERS, "Libraries and schedules.", PEERS),
    remat=(["on", "off"], "Re-materialisation.", ["on", "off"]),
    m=([8], "Micro-batches, of work A and B."),
    time=(True, "Whether to measure time."),
    memory=(True, "Whether to measure memory."),
)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures every group of configurations that take turns."""
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


_ROOT = pathlib.Path(__file__).resolve().parents[2]


# The programs say more.
INSTALL = {
    "tfgpipe": "pip install '.[tensorflow]'",
    "lingvo": (
        "pip install tensorflow-cpu==2.21.0 && pip install --no-deps "
        "lingvo==0.14.2 && pip install sympy sentencepiece matplotlib etils, "
        "in an environment of its own; then --lingvo_python=<its python>"
    ),
    "torchgpipe": (
        "pip install torch==2.13.0 numpy torchgpipe==0.0.7, in an environment "
        "of its own; then --torch_python=<its python>"
    ),
    "torch": (
        "pip install torch==2.13.0 numpy, in an environment of its own; then "
        "--torch_python=<its python>"
    ),
}


class Configuration(NamedTuple):
    """What one worker does."""

    peer: str
    work: str
    k: int
    m: int
    remat: bool

    def order(self) -> Order:
        """What its program is told."""
        variant = PEERS[self.peer].variant
        return Order(self.work, self.k, self.m, self.remat, variant)

    def row(self) -> dict[str, Any]:
        """The columns that name it."""
        ours = PEERS[self.peer].library == "tfgpipe"
        return {
            "work": self.work,
            "remat": "on" if self.remat else "off",
            "m": self.m,
            "library": f"tfgpipe {self.peer}" if ours else self.peer,
            "k": self.k,
        }


def not_installed(
    names: Sequence[str], pythons: dict[str, str | None]
) -> list[str]:
    """The peers that cannot be run."""
    peers = {name: PEERS[name] for name in names}
    found = {
        peer.library: _has(pythons[peer.python], peer.library)
        for peer in peers.values()
    }
    return [name for name, peer in peers.items() if not found[peer.library]]


def _has(python: str | None, module: str) -> bool:
    """Whether an interpreter finds a module, without importing it."""
    if not python:
        return False
    code = (
        "import importlib.util, sys; "
        f"sys.exit(importlib.util.find_spec({module!r}) is None)"
    )
    try:
        done = subprocess.run([python, "-c", code], cwd=_ROOT, timeout=60)
    except OSError:
        return False
    return done.returncode == 0


def is_possible(c: Configuration) -> bool:
    """False for what a peer cannot do by design."""
    if c.work not in PEERS[c.peer].works:
        return False
    if c.peer == "lingvo":  # never at K = M = 1, always elsewhere
        return c.remat != (c.k == c.m == 1)
    if PEERS[c.peer].library == "torch" and c.order().schedule == "1f1b":
        return c.m >= c.k
    return c.remat or "remat" not in PEERS[c.peer].variant


def start(
    c: Configuration,
    pythons: dict[str, str | None],
    environment: dict[str, str],
    is_pinned: bool = False,
) -> Worker:
    """Starts a worker."""
    peer = PEERS[c.peer]
    program = f"tools.bench.peer_programs.{peer.library}_worker"
    command = [str(pythons[peer.python]), "-m", program, *c.order().words()]
    variables = {"PYTHONPATH": str(_ROOT), **environment}
    return Worker(command, variables, is_pinned)
