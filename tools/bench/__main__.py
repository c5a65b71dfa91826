"""Measures tfgpipe. Each sub-command makes one kind of table.

    python -m tools.bench --help
    python -m tools.bench efficiency
    python -m tools.bench efficiency --help
    python -m tools.bench throughput --k=1,2 --m=1,8 --format=json

Every sub-command is a module, `tools/bench/<name>.py`, with `FLAGS`, its flags,
and `run(values, report)`, which adds tables to the report.
"""

import shlex
import sys
from types import ModuleType

from absl import flags

from tfgpipe.commands import command_line
from tools.report import Report

COMMANDS = {
    "efficiency": "steps of timed cells beside their schedule's lower bound",
    "throughput": "speed-up with more cells and micro-batches, real models",
    "overhead": "one cell beside plain Keras; time to dispatch a task",
    "replicas": "replicas of timed cells; what each of their devices owns",
    "memory": "the largest model that fits; memory of an accelerator",
    "plan": "what the planner predicts beside what is measured",
    "alternatives": "the same models by tfgpipe, Keras, and Keras on JAX",
    "gpu": "models on a GPU: beside plain Keras, and cut into devices",
    "table1": "the paper's table 1 on a GPU that is cut into devices",
    "peers": "torch pipelining on the same work",
}


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run_sub_command`.

    It prints after Ctrl-C, too, what there is by then.
    """

    def body(name: str, module: ModuleType, values: flags.FlagValues) -> None:
        report = Report(name, values.format)
        try:
            module.run(values, report)
        except KeyboardInterrupt:
            report.print()
            raise
        report.print()
        if values.figure:
            words = [w for w in argv[1:] if not w.startswith("--figure")]
            command = shlex.join(["python", "-m", "tools.bench", *words])
            report.write(values.figure, command)

    return command_line.run_sub_command("tools.bench", COMMANDS, body, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
