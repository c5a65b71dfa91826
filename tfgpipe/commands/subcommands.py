"""The command line of a program whose sub-commands are its modules."""

import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from absl import flags

from tfgpipe.commands import command_line


def run(
    program: str,
    commands: Mapping[str, str],
    body: Callable[[str, ModuleType, flags.FlagValues], None],
    argv: Sequence[str],
    package: str | None = None,
) -> int:
    """Does the work of a sub-command, or lists them all.

    Args:
        program: Its name: that of a script, such as "tfgpipe", or of a package
            that is run by `python -m`, such as "tools.bench".
        commands: What each sub-command does, by name.
        body: Called with a sub-command's name, its module and its parsed flags.
            Its errors are as for `command_line.run`.
        argv: The program, the sub-command, its flags.
        package: Where a sub-command is the module of its name, with `FLAGS`,
            its flags. `None` if the program is that package.

    Returns:
        The exit code: 0; 2 for bad flags; 130 after Ctrl-C.
    """
    called = program if package else f"python -m {program}"
    name = argv[1] if len(argv) > 1 else ""
    if name in ("--help", "-h", "help"):
        print(_usage(called, commands))
        return 0
    if name not in commands:
        print(f"{program}: {_unknown(name, commands)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"{package or program}.{name}")
    logging.getLogger("tensorflow").addFilter(_is_worth_showing)
    usage = f"Usage: {called} {name} [FLAGS]"
    return command_line.run(
        f"{program} {name}" if package else program,
        module.FLAGS,
        f"{usage}\n\n{module.__doc__ or ''}",
        lambda values: body(name, module, values),
        [argv[0], *argv[2:]],
    )


def _usage(called: str, commands: Mapping[str, str]) -> str:
    width = max(map(len, commands))
    return "\n".join(
        [
            f"Usage: {called} SUB-COMMAND [FLAGS]",
            "",
            *(f"  {name:{width}}  {what}" for name, what in commands.items()),
            "",
            f"{called} SUB-COMMAND --help lists its flags.",
        ]
    )


def _unknown(name: str, commands: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, commands, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        "The first argument must be a sub-command: one of "
        f"{', '.join(commands)}. Received: {name!r}.{hint}"
    )


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Not that many models are traced: that is what these programs do."""
    return "triggered tf.function retracing" not in record.getMessage()
