"""Trains what the table of results needs, and shows the results.

    python -m tools.results --help
    python -m tools.results image
    python -m tools.results transfer --num_runs=5
    python -m tools.results lm --steps=20

Each sub-command does one row: it trains models with the experiments of
`params`, and what they are compared with. Runs that were interrupted are
resumed, and finished ones are not done again. It prints tables, and writes a
picture and the numbers: results_<name>.png and results_<name>.json.

Every sub-command is a module, `tools/results/<name>.py`, with `FLAGS`, its
flags, and `run(values)`, which returns an `Outcome`.
"""

import importlib.util
import json
import pathlib
import shlex
import sys
from types import ModuleType
from typing import Any

from absl import flags

from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import BadFlags
from tfgpipe.files import write_text
from tools.report import Report, environment
from tools.results.outcome import Outcome

COMMANDS = {
    "image": "AmoebaNet-D on images of clothing, beside plain Keras",
    "transfer": "new classes from few examples, fine-tuned or from scratch",
    "lm": "a Transformer language model beside a 5-gram model",
    "translation": "102 languages to English: three shapes, one language each",
    "batch_size": "translation with three sizes of mini-batches",
}


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run_sub_command`.

    After Ctrl-C the same command goes on.
    """

    def body(name: str, module: ModuleType, values: flags.FlagValues) -> None:
        output = _output(values)
        _show(name, module.run(values), values, output, argv)

    return command_line.run_sub_command("tools.results", COMMANDS, body, argv)


def _output(values: flags.FlagValues) -> pathlib.Path:
    """The folder for files, before there is work to lose."""
    if not importlib.util.find_spec("matplotlib"):
        raise BadFlags(
            "tools.results draws with matplotlib, which is not installed. "
            "Install it: pip install '.[tools]'"
        )
    default = values.runs_dir if values.steps else "docs"
    folder = pathlib.Path(values.output or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFlags(
            "--output must be a folder that can be written to. Received: "
            f"{folder}, which gives: {error}."
        ) from error
    return folder


def _show(
    name: str,
    outcome: Outcome,
    values: flags.FlagValues,
    folder: pathlib.Path,
    argv: list[str],
) -> None:
    """Prints the tables; writes the picture and the numbers."""
    from tools.results import plots  # needs matplotlib

    trial = f" (tried with {values.steps} steps)" if values.steps else ""
    report = Report(name, values.format)
    for table in outcome.tables:
        table.title += trial
        report.add(table)
    picture = folder / f"results_{name}.png"
    plots.save(outcome.picture, trial, picture)
    numbers = folder / f"results_{name}.json"
    command = shlex.join(["python", "-m", "tools.results", *argv[1:]])
    write_text(numbers, _as_json(command, outcome) + "\n")
    report.print()
    # Not among numbers that a program may read.
    where = sys.stdout if values.format == "text" else sys.stderr
    print(f"\nWrote {picture} and {numbers}.", file=where)


def _as_json(command: str, outcome: Outcome) -> str:
    made: dict[str, Any] = {
        "command": command,
        "environment": environment(),
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "rows": table.rows,
                "notes": table.notes,
            }
            for table in outcome.tables
        ],
        "picture": outcome.picture._asdict(),
    }
    return json.dumps(made, indent=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
