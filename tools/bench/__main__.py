"""Measures tfgpipe. Each sub-command makes one kind of table.

    python -m tools.bench --help
    python -m tools.bench efficiency
    python -m tools.bench efficiency --help
    python -m tools.bench throughput --k=1,2 --m=1,8 --format=csv

Every sub-command is a module, `tools/bench/<name>.py`, with `FLAGS`, its flags,
and `run(values, report)`, which adds tables to the report; it raises `BadFlags`
for flags that do not go together.
"""

import sys
from types import ModuleType

from absl import flags

from tfgpipe.commands import command_line
from tools.report import Report

COMMANDS = {
    "efficiency": "steps of timed cells beside their schedule's lower bound",
    "throughput": "speed-up with more cells and micro-batches, real models",
    "overhead": "one cell beside plain Keras; dispatch and tracing time",
    "generate": "tokens a second of timed cells, by groups of prompts",
    "replicas": "replicas of timed cells; what each of their devices owns",
    "memory": "the largest model that fits; memory of an accelerator",
    "recompute": "recomputation beside tf.recompute_grad in plain Keras",
    "plan": "what the planner predicts beside what is measured",
    "gpu": "models on a GPU: beside plain Keras, and cut into devices",
    "table1": "the paper's table 1 on a GPU that is cut into devices",
    "peers": "Lingvo, torchgpipe and torch pipelining on the same work",
}


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run_sub_command`."""
    return command_line.run_sub_command("tools.bench", COMMANDS, _measure, argv)


def _measure(name: str, module: ModuleType, values: flags.FlagValues) -> None:
    """Measures, and prints; after Ctrl-C too, what there is by then."""
    report = Report(name, values.format)
    try:
        module.run(values, report)
    except KeyboardInterrupt:
        report.print()
        raise
    report.print()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
