"""The libraries that `tools.bench peers` compares, and what each can do."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.bench.step_worker import Worker

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Peer(NamedTuple):
    """A library, or a way to use it.

    Attributes:
        script: In --peers_dir; empty for this package.
        python: Which interpreter: "tfgpipe", "lingvo" or "torch".
        module: Whose presence shows that it is installed.
        variant: What the script is told.
        baseline: The peer whose K = 1 it is compared with.
        works: The work it can do.
        keeps_gradients: Whether the resting process still holds them.
        runs_in: A program of this package that runs the script, if any.
    """

    script: str
    python: str
    module: str
    variant: str
    baseline: str
    works: str = "ABC"
    keeps_gradients: bool = False
    runs_in: str = ""

    def program(self, folder: pathlib.Path) -> list[str]:
        """What its interpreter runs, the scripts being in a folder."""
        if self.runs_in:
            return [str(_ROOT / self.runs_in)]
        if self.script:
            return [str(folder / self.script)]
        return ["-m", "tools.bench.peer_adapter"]


def _ours(variant: str, works: str = "ABC", baseline: str = "gpipe") -> Peer:
    return Peer("", "tfgpipe", "tfgpipe", variant, baseline, works)


def _torch(variant: str) -> Peer:
    return Peer(
        "peer_torchpp.py",
        "torch",
        "torch.distributed.pipelining",
        variant,
        "torch-gpipe",
        keeps_gradients=True,
    )


def _torch_compiled(variant: str) -> Peer:
    return _torch(variant)._replace(
        baseline="torch-gpipe-compiled",
        works="AB",
        runs_in="tools/bench/compiled_torch.py",
    )


PEERS = {
    "gpipe": _ours("gpipe"),
    "gpipe-always": _ours("gpipe,remat=always"),
    "gpipe-groups": _ours("gpipe,remat_groups=4"),
    "1f1b": _ours("1f1b"),
    "1f1b-groups": _ours("1f1b,remat_groups=4"),
    "interleaved": _ours("interleaved", "AB"),
    "zero_bubble": _ours("zero_bubble"),
    "gpipe-xla": _ours("gpipe,jit_compile=yes", "AB", "gpipe-xla"),
    "1f1b-xla": _ours("1f1b,jit_compile=yes", "AB", "gpipe-xla"),
    "zero_bubble-xla": _ours("zero_bubble,jit_compile=yes", "AB", "gpipe-xla"),
    "gpipe-keras": _ours("gpipe,layers=keras", "A", "gpipe-keras"),
    "lingvo": Peer("peer_lingvo.py", "lingvo", "lingvo", "", "lingvo"),
    "torchgpipe": Peer(
        "peer_torchgpipe.py",
        "torch",
        "torchgpipe",
        "",
        "torchgpipe",
        works="AB",  # C takes it minutes a step
        keeps_gradients=True,
    ),
    "torch-gpipe": _torch("gpipe"),
    "torch-1f1b": _torch("1f1b"),
    "torch-interleaved": _torch("interleaved"),
    "torch-gpipe-compiled": _torch_compiled("gpipe"),
    "torch-1f1b-compiled": _torch_compiled("1f1b"),
    "torch-interleaved-compiled": _torch_compiled("interleaved"),
}
INSTALL = {
    "tfgpipe": "pip install '.[tensorflow]'",
    "lingvo": (
        "in an environment of its own, pip install tensorflow-cpu==2.21.0; "
        "pip install --no-deps lingvo==0.14.2; pip install sympy "
        "sentencepiece matplotlib etils; then --lingvo_python=<its python>"
    ),
    "torch": (
        "in an environment of its own, pip install torch==2.13.0 numpy "
        "torchgpipe==0.0.7; then --torch_python=<its python>"
    ),
}


class Configuration(NamedTuple):
    """What one worker does."""

    peer: str
    work: str
    k: int
    m: int
    remat: bool

    def row(self) -> dict[str, Any]:
        """The columns that name it."""
        ours = not PEERS[self.peer].script
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
    found = {
        (peer.python, peer.module): _has(pythons[peer.python], peer.module)
        for peer in (PEERS[name] for name in names)
    }
    return [n for n in names if not found[PEERS[n].python, PEERS[n].module]]


def _has(python: str | None, module: str) -> bool:
    """Whether an interpreter finds a module, without importing it."""
    if python is None:
        return False
    code = (
        "import importlib.util, sys; "
        f"sys.exit(importlib.util.find_spec({module.partition('.')[0]!r})"
        " is None)"
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
    if PEERS[c.peer].python == "torch" and PEERS[c.peer].variant == "1f1b":
        return c.m >= c.k
    return c.remat or "remat" not in PEERS[c.peer].variant


def start(
    c: Configuration,
    pythons: dict[str, str | None],
    folder: pathlib.Path,
    environment: dict[str, str],
    is_pinned: bool = False,
) -> Worker:
    """Starts a worker.

    Args:
        c: What it does.
        pythons: Interpreters by kind of peer.
        folder: That of the scripts.
        environment: More variables for it.
        is_pinned: Whether it may use one core only.
    """
    peer = PEERS[c.peer]
    path = [str(folder)] if peer.script else [str(folder), str(_ROOT)]
    command = [
        str(pythons[peer.python]),
        *peer.program(folder),
        f"--workload={c.work}",
        f"--K={c.k}",
        f"--M={c.m}",
        f"--remat={int(c.remat)}",
        f"--variant={peer.variant}",
    ]
    variables = {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",  # the scripts' folder may be another's
        **environment,
    }
    return Worker(command, variables, is_pinned)
