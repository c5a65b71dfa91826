"""Flags, messages, exit codes and sub-commands of programs.

Each has a set of flags, so that several of them can be imported.
"""

import contextlib
import copy
import importlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TypeVar

from absl import flags

_Item = TypeVar("_Item")

_QUIET = 10.0  # seconds, until it is said what is done; then twice as many


def new_flags() -> flags.FlagValues:
    """Returns flags with --help alone."""
    values = flags.FlagValues()
    flags.DEFINE_boolean(
        "help", False, "Print this.", short_name="h", flag_values=values
    )
    return values


def define_count(
    values: flags.FlagValues, name: str, text: str, default: int | None = None
) -> None:
    """Defines a flag that is a positive number."""
    flags.DEFINE_integer(name, default, text, 1, flag_values=values)


def define_cells(
    values: flags.FlagValues, k: int | None = None, m: int | None = None
) -> None:
    """Defines --num_partitions and --num_micro_batches."""
    define_count(values, "num_partitions", "K, the number of cells.", k)
    define_count(
        values, "num_micro_batches", "M, the number of micro-batches.", m
    )


def run(
    name: str,
    values: flags.FlagValues,
    usage: str | None,
    body: Callable[[flags.FlagValues], int | None],
    argv: Sequence[str],
) -> int:
    """Parses flags and does a command's work.

    Args:
        name: Of the command, such as "tfgpipe plan".
        values: Its flags, not parsed yet; they stay so.
        usage: Text of --help before the flags.
        body: Does the work; may return an exit code. Errors about what the
            user gave are `ValueError`, `FileNotFoundError`, or `ImportError`
            for a package that is not installed.
        argv: The program and its flags.

    Returns:
        The exit code: 0, or of the body; 2 for bad flags; 130 after Ctrl-C.
    """
    values = copy.deepcopy(values)  # can be parsed once
    try:
        rest = values(list(argv))[1:]
        if values.help:
            print(f"{usage}\n{values.get_help(include_special_flags=False)}")
            return 0
        if rest:
            raise ValueError(f"Expected only flags. Received: {rest}.")
        return body(values) or 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (flags.Error, ValueError, FileNotFoundError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def run_sub_command(
    program: str,
    commands: Mapping[str, str],
    body: Callable[[str, ModuleType, flags.FlagValues], int | None],
    argv: Sequence[str],
    package: str | None = None,
) -> int:
    """Does the work of a sub-command, or lists them all.

    Args:
        program: Its name, of a script, such as "tfgpipe", or of a package
            that is run by `python -m`, such as "tools.bench".
        commands: What each sub-command does, by name.
        body: Called with a sub-command's name, its module and its parsed flags.
            Its errors are as for `run`.
        argv: The program, the sub-command, its flags.
        package: Where a sub-command is the module of its name, with `FLAGS`,
            its flags. `None` if the program is that package.

    Returns:
        The exit code, as of `run`.
    """
    called = program if package else f"python -m {program}"
    name = argv[1] if len(argv) > 1 else ""
    if name in ("--help", "-h", "help"):
        print(f"Usage: {called} SUB-COMMAND [FLAGS]\n")
        for command, purpose in commands.items():
            print(f"  {command:12} {purpose}")
        print(f"\n{called} SUB-COMMAND --help lists its flags.")
        return 0
    if name not in commands:
        print(
            f"{program}: The first argument must be a sub-command: one of "
            f"{', '.join(commands)}. Received: {name!r}.",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(f"{package or program}.{name}")
    return run(
        f"{program} {name}" if package else program,
        module.FLAGS,
        f"Usage: {called} {name} [FLAGS]\n\n{module.__doc__ or ''}",
        lambda values: body(name, module, values),
        [argv[0], *argv[2:]],
    )


def require(values: flags.FlagValues, *names: str) -> None:
    """Refuses flags that lack some without which there is nothing to do."""
    lacking = [f"--{name}" for name in names if values[name].value is None]
    if lacking:
        raise ValueError(
            f"{' and '.join(lacking)} must be given. --help shows an example."
        )


def output_path(text: str | None) -> pathlib.Path | None:
    """Returns the file of --output; None for none.

    Raises:
        ValueError: If its folder is missing, before there is work to lose.
    """
    if text is None:
        return None
    path = pathlib.Path(text)
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"--output must be in a folder that there is. Received: {text}."
        )
    return path


@contextlib.contextmanager
def doing(work: str) -> Iterator[None]:
    """Inside, says on the standard error now and then what is done.

    After ten seconds, after twenty more, and so on. `work` is in words, as
    "building the model".
    """
    start, has_ended = time.monotonic(), threading.Event()

    def speak() -> None:
        quiet = _QUIET
        while not has_ended.wait(quiet):
            seconds = time.monotonic() - start
            print(f"{work}, {seconds:.0f} s", file=sys.stderr, flush=True)
            quiet *= 2

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def progress(items: Iterable[_Item], work: str) -> Iterator[_Item]:
    """Yields items; says now and then how many are done, see `doing`."""
    known = list(items)
    for count, item in enumerate(known):
        with doing(f"{work}: {count} of {len(known)}"):
            yield item
