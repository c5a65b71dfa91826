"""Trains what the tables of results need, and shows the results.

    python -m tools.results --help
    python -m tools.results image
    python -m tools.results lm --steps=20

Each sub-command trains models with the experiments of `params`, and what they
are compared with. Runs that were interrupted are resumed, and finished ones are
not done again. It prints tables; with --figure, it writes them for pages.

Every sub-command is a module, `tools/results/<name>.py`, with `FLAGS`, its
flags, and `run(values)`, which returns the tables.
"""

import shlex
import sys
from types import ModuleType

from absl import flags

from tfgpipe.commands import command_line
from tools.report import Report

COMMANDS = {
    "image": "AmoebaNet-D on images of clothing, beside plain Keras",
    "lm": "a Transformer language model",
    "translation": "102 languages to English: three shapes, one language each",
}


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run_sub_command`.

    After Ctrl-C the same command goes on.
    """

    def body(name: str, module: ModuleType, values: flags.FlagValues) -> None:
        report = Report(name, values.format)
        for table in module.run(values):
            if values.steps:
                table.title += f" (tried with {values.steps} steps)"
            report.add(table)
        report.print()
        if values.figure:
            words = [w for w in argv[1:] if not w.startswith("--figure")]
            command = shlex.join(["python", "-m", "tools.results", *words])
            report.write(values.figure, command)

    return command_line.run_sub_command("tools.results", COMMANDS, body, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
