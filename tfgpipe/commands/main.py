"""The program `tfgpipe`: one sub-command a module of this package.

A sub-command has `FLAGS`, its flags, and `run(values)`, which does its work,
and may return another exit code than 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from absl import flags

from tfgpipe.commands import command_line

COMMANDS = {
    "plan": "chooses cells, micro-batches, schedule and remat for a model",
    "profile": "measures what each layer of a model takes on one device",
    "check": "compares a step of a pipeline with plain Keras",
    "timeline": "shows when each task of a schedule runs",
    "report": "measures this machine, for a report of a bug",
    "worker": "lends this host's devices to a training on another host",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `command_line.run_sub_command`.

    Args:
        argv: The program and its arguments. `None` for this process's.
    """
    codes: list[int] = []

    def body(name: str, module: ModuleType, values: flags.FlagValues) -> None:
        codes.append(module.run(values) or 0)

    failed = command_line.run_sub_command(
        "tfgpipe",
        COMMANDS,
        body,
        sys.argv if argv is None else argv,
        package="tfgpipe.commands",
    )
    return failed or sum(codes)
