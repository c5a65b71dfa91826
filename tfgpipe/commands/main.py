"""The program `tfgpipe`: one sub-command a module of this package.

A sub-command has `FLAGS`, its flags, and `run(values)`, which does its work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from absl import flags

from tfgpipe.commands import subcommands

COMMANDS = {
    "worker": "lends this host's devices to a training on another host",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `subcommands.run`.

    Args:
        argv: The program and its arguments. `None` for those of this process.
    """
    argv = sys.argv if argv is None else argv
    return subcommands.run(
        "tfgpipe", COMMANDS, _run, argv, package="tfgpipe.commands"
    )


def _run(name: str, module: ModuleType, values: flags.FlagValues) -> None:
    module.run(values)
