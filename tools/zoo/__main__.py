"""Trains published models in four cells and in plain Keras, and compares.

    python -m tools.zoo --help
    python -m tools.zoo --models=ViT,VGG16
    python -m tools.zoo --output=docs/models.md

Each is trained in a process of its own. With --output, a page is written after
each, and what was found beside it, as JSON: a later run of some models keeps
what it says of the others. Models of KerasHub fail where that is not installed.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

from absl import flags

from tfgpipe.commands import command_line
from tfgpipe.files import write_text
from tools.flags import define
from tools.report import progress
from tools.zoo import applications, kerashub, own_calls, table
from tools.zoo.trial import SAMPLES, Row

FLAGS = command_line.new_flags()
flags.DEFINE_list(
    "models", None, "Names of models. All by default.", flag_values=FLAGS
)
define(
    FLAGS,
    output=(
        str,
        "The page to write, such as docs/models.md. By default it is printed.",
    ),
    timeout=(1800.0, "Seconds that a model may take.", 1.0),
)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    return command_line.run("tools.zoo", FLAGS, __doc__, _train, argv)


def _train(values: flags.FlagValues) -> None:
    names = list(SAMPLES) if values.models is None else values.models
    if unknown := sorted(set(names) - set(SAMPLES)):
        raise ValueError(
            f"--models must name models of {list(SAMPLES)}. "
            f"Received: {unknown}."
        )
    output = None if values.output is None else pathlib.Path(values.output)
    rows: dict[str, Row] = {}
    kept = None if output is None else output.with_suffix(".json")
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text("utf-8"))
        rows = {row["name"]: Row(**row) for row in found}
    for name in progress(names, "models"):
        rows[name] = _tried(name, values.timeout)
        if output is not None and kept is not None:
            write_text(output, _page(rows))
            text = json.dumps(
                [dataclasses.asdict(row) for row in rows.values()], indent=1
            )
            write_text(kept, text + "\n")
    if output is None:
        print(_page(rows))


def _tried(name: str, timeout: float) -> Row:
    """Trains a model in a process of its own."""
    command = [sys.executable, "-m", "tools.zoo.trial", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Row(name, f"it took more than {timeout:g} seconds")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        log = done.stderr.strip().splitlines() or ["nothing was printed"]
        return Row(name, f"exit code {done.returncode}: {log[-1]}")
    return Row(**json.loads(last))


def _page(rows: dict[str, Row]) -> str:
    def of(samples: dict) -> list[Row]:
        return [rows[name] for name in samples if name in rows]

    kinds = applications, kerashub, own_calls
    return table.page(*(of(kind.SAMPLES) for kind in kinds))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
