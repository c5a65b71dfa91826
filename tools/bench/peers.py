"""The same work in tfgpipe and in torch pipelining, in the same run.

Eight Transformer blocks, with the same weights and data. One accelerator is one
thread, K = 1 is pinned to one core. The workers take turns, a step at a time;
`others` is what other processes used of the machine meanwhile. Memory is the
peak of warm steps above the resting process, all processes of a peer together,
in a run of its own in which freed memory goes back at once. TensorFlow's oneDNN
is on for times, as it always is in torch, and off for memory, as it keeps what
it has had. The programs are in `tools.bench.peer_programs`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

from absl import flags

from tools.bench.memory_worker import EXACT_MEMORY
from tools.bench.peer_programs.work import Order
from tools.bench.step_worker import Worker, in_turns, median
from tools.flags import define, new_flags
from tools.report import Report, Table, columns, spread, spread_values

COLUMNS = columns(
    "library | k: K | *seconds: s/step: .3f | speedup: speed-up: .2f | "
    "of_ideal: / ideal: .2f | mib: peak MiB: .0f | "
    "loss_difference: loss differs: .0e | others: others: .0%"
)
INSTALL = (
    "pip install torch==2.13.0 numpy, in an environment of its own; then "
    "--torch_python=<its python>"
)
# Torch has oneDNN in any case; TensorFlow leaves it out on some processors.
_ALIKE = {"TF_ENABLE_ONEDNN_OPTS": "1"}
_START_SECONDS = 300.0
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Configuration(NamedTuple):
    """What one worker does, see `Order`."""

    library: str
    k: int
    schedule: str
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """Returns what it is called in the table."""
        end = " compiled" if self.is_compiled else ""
        return f"{self.library} {self.schedule}{end}"


CONFIGURATIONS = [
    Configuration(library, k, schedule, is_compiled)
    for library in ("tfgpipe", "torch")
    for is_compiled in (False, True)
    for k, schedule in (
        (1, "gpipe"),  # the first of those that it is compared with
        (2, "gpipe"),
        (2, "1f1b"),
        (2, "interleaved"),
        (2, "zero_bubble"),
    )
    if library == "tfgpipe" or schedule != "zero_bubble"
]
FLAGS = new_flags(rounds=7)
define(
    FLAGS,
    torch_python=(
        os.environ.get("PEERS_TORCH_PY", sys.executable),
        "Python that has torch. Default: $PEERS_TORCH_PY, else this one.",
    ),
    m=(8, "Micro-batches."),
)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures all that are installed."""
    table = report.add(Table("peers", __doc__.partition("\n")[0], COLUMNS))
    rows: dict[Configuration, dict[str, Any]] = {
        c: {"library": c.name, "k": c.k} for c in CONFIGURATIONS
    }
    if not _has_torch(values.torch_python):
        table.notes.append(f"torch is not installed: {INSTALL}")
        rows = {c: row for c, row in rows.items() if c.library != "torch"}
    _measure_time(rows, values)
    _measure_memory(rows, values, table.notes)
    table.rows += [row for row in rows.values() if len(row) > 2]
    table.notes += [
        "speed-up: over the library's K = 1 on one core, with the same M.",
        "/ ideal: speed-up over K M / (M + K - 1).",
        "peak MiB: of warm steps: activations and gradients, no weights. The "
        "gradients that torch's processes hold between steps are added.",
        "loss differs: largest relative difference of the first three losses "
        "from the first row's.",
        "others: share of the machine other processes had in a step, at most.",
    ]


def _measure_time(
    rows: dict[Configuration, dict[str, Any]], values: flags.FlagValues
) -> None:
    """Adds the columns of time to the rows."""
    workers = in_turns(
        [*rows],
        values.rounds,
        "peers",
        lambda c: start(c, values, _ALIKE, is_pinned=c.k == 1),
    )
    for c in rows:
        rows[c] |= _times(c, workers, values)


def _times(
    c: Configuration,
    ready: dict[Configuration, Worker],
    values: flags.FlagValues,
) -> dict[str, Any]:
    """Returns the columns of time of one configuration."""
    steps = ready[c].steps
    row: dict[str, Any] = spread_values(
        "seconds", spread([s.seconds for s in steps])
    )
    row["others"] = max(step.others for step in steps)
    losses = [w.ready["losses"] for w in (next(iter(ready.values())), ready[c])]
    row["loss_difference"] = max(abs(a - b) / abs(a) for a, b in zip(*losses))
    base = ready[c._replace(k=1, schedule="gpipe")]
    row["speedup"] = median(base.steps) / median(steps)
    ideal = c.k * values.m / (values.m + c.k - 1)
    return row | {"of_ideal": row["speedup"] / ideal}


def _measure_memory(
    rows: dict[Configuration, dict[str, Any]],
    values: flags.FlagValues,
    notes: list[str],
) -> None:
    """Adds the column of memory to the rows, those of tfgpipe first."""
    gradients = 0.0  # MiB; the same for all
    for c, row in rows.items():
        worker = start(c, values, EXACT_MEMORY)
        try:
            if not worker.wait(_START_SECONDS):
                notes.append(f"{c.name}: no memory: {worker.why_not()}")
                continue
            row["mib"] = worker.ask("mem")["mib"]
            if c.library == "torch":
                row["mib"] += gradients
            else:
                gradients = worker.ready["parameter_bytes"] / 2**20
        finally:
            worker.close()


def _has_torch(python: str) -> bool:
    """Returns whether an interpreter finds torch, without importing it."""
    code = "import importlib.util as i, sys; sys.exit(not i.find_spec('torch'))"
    try:
        done = subprocess.run([python, "-c", code], cwd=_ROOT, timeout=60)
    except OSError:
        return False
    return done.returncode == 0


def start(
    c: Configuration,
    values: flags.FlagValues,
    environment: dict[str, str],
    is_pinned: bool = False,
) -> Worker:
    """Starts a worker."""
    python = values.torch_python if c.library == "torch" else sys.executable
    program = f"tools.bench.peer_programs.{c.library}_worker"
    order = Order(c.k, values.m, c.schedule, c.is_compiled)
    command = [python, "-m", program, json.dumps(order._asdict())]
    variables = {"PYTHONPATH": str(_ROOT), **environment}
    return Worker(command, variables, is_pinned)
