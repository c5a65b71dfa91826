"""The program `tfgpipe`, also run by `python -m tfgpipe`.

A sub-command is a module of `commands`. It has `FLAGS`, its flags, and
`run(values)`, which does its work, and may return another exit code than 0.
"""

import sys
from collections.abc import Sequence

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
    """Runs the command line, by default this process's."""
    return command_line.run_sub_command(
        "tfgpipe",
        COMMANDS,
        lambda name, module, values: module.run(values),
        sys.argv if argv is None else argv,
        package="tfgpipe.commands",
    )


if __name__ == "__main__":
    sys.exit(main())
