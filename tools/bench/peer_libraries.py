"""The libraries that `tools.bench peers` compares, and what each can do."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.bench.peer_programs.protocol import Order
from tools.bench.step_worker import Worker

_ROOT = pathlib.Path(__file__).resolve().parents[2]


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
    """The peers that cannot be run.

    Args:
        names: Keys of `PEERS`.
        pythons: For each kind of peer its interpreter, or None.
    """
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
    """Starts a worker.

    Args:
        c: What it does.
        pythons: Interpreters by kind of peer.
        environment: More variables for it.
        is_pinned: Whether it may use one core only.
    """
    peer = PEERS[c.peer]
    program = f"tools.bench.peer_programs.{peer.library}_worker"
    command = [str(pythons[peer.python]), "-m", program, *c.order().words()]
    variables = {"PYTHONPATH": str(_ROOT), **environment}
    return Worker(command, variables, is_pinned)
