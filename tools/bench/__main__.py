"""Measures tfgpipe. Each sub-command makes one kind of table.

    python -m tools.bench --help
    python -m tools.bench efficiency
    python -m tools.bench efficiency --help
    python -m tools.bench throughput --k=1,2 --m=1,8 --format=csv

Every sub-command is a module, `tools/bench/<name>.py`, with `FLAGS`, its flags,
and `run(values, report)`, which adds tables to the report; it raises `BadFlags`
for flags that do not go together.
"""

import copy
import difflib
import importlib
import logging
import os
import re
import sys
import types

from absl import flags

from tools.bench.flags import BadFlags
from tools.report import Report

COMMANDS = {
    "efficiency": "steps of timed cells beside their schedule's lower bound",
    "throughput": "speed-up with more cells and micro-batches, real models",
    "overhead": "one cell beside plain Keras; dispatch and tracing time",
    "replicas": "replicas of timed cells; what each of their devices owns",
    "memory": "the largest model that fits; memory of an accelerator",
    "peers": "Lingvo, torchgpipe and torch pipelining on the same work",
}


def main(argv: list[str]) -> int:
    """Runs the command line.

    Args:
        argv: The program, the sub-command, its flags.

    Returns:
        The exit code: 0; 2 for bad flags; 130 after Ctrl-C.
    """
    # TensorFlow's start-up messages hide what is printed.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if argv[1:2] in (["--help"], ["-h"], ["help"]):
        print(_usage())
        return 0
    try:
        name, module = _command(argv)
        values = copy.deepcopy(module.FLAGS)  # can be parsed once
        rest = values([f"{argv[0]} {argv[1]}", *argv[2:]])[1:]
        if values.help:
            print(_help(name, module))
            return 0
        if rest:
            raise BadFlags(f"Expected only flags. Received: {rest}.")
        return _run(module, values, Report(name, values.format))
    except flags.Error as error:
        print(f"tools.bench: {error}", file=sys.stderr)
        return 2


def _run(
    module: types.ModuleType, values: flags.FlagValues, report: Report
) -> int:
    """Measures, and prints; after Ctrl-C too, what there is by then."""
    logging.getLogger("tensorflow").addFilter(_is_worth_showing)
    try:
        module.run(values, report)
    except KeyboardInterrupt:
        report.print()
        print("tools.bench: interrupted", file=sys.stderr)
        return 130
    report.print()
    return 0


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Not that many models are traced: that is what benchmarks do."""
    return "triggered tf.function retracing" not in record.getMessage()


def _command(argv: list[str]) -> tuple[str, types.ModuleType]:
    """The sub-command's name and module."""
    name = argv[1] if len(argv) > 1 else ""
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise BadFlags(
            "The first argument must be a sub-command: one of "
            f"{', '.join(COMMANDS)}. Received: {name!r}.{hint}"
        )
    return name, importlib.import_module(f"tools.bench.{name}")


def _usage() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "Usage: python -m tools.bench SUB-COMMAND [FLAGS]",
            "",
            *(f"  {name:{width}}  {what}" for name, what in COMMANDS.items()),
            "",
            "python -m tools.bench SUB-COMMAND --help lists its flags.",
        ]
    )


def _help(name: str, module: types.ModuleType) -> str:
    usage = f"Usage: python -m tools.bench {name} [FLAGS]"
    listed = module.FLAGS.get_help(include_special_flags=False)
    # Without the lines that name modules; an entry starts with "  -".
    lines = [line for line in listed.splitlines() if line.startswith("  ")]
    entries = re.split(r"\n(?=  -)", "\n".join(lines))
    entries.sort(key=lambda entry: re.sub(r"\W|no", "", entry.split(":")[0]))
    return "\n".join([usage, "", module.__doc__ or "", *entries])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
