"""What commands have in common: flags, messages, exit codes.

Each has a set of flags of its own, so that several of them can be imported.
"""

import copy
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from absl import flags

from tfgpipe.commands.progress import speaking
from tfgpipe.schedules import (
    REMAT,
    SCHEDULES,
    Rule,
    checked_rule,
    rule_of,
)


class BadFlags(flags.Error):
    """What the flags ask for cannot be done; the message says why."""


def new_flags() -> flags.FlagValues:
    """Flags with --help alone."""
    values = flags.FlagValues()
    flags.DEFINE_boolean(
        "help", False, "Print this.", short_name="h", flag_values=values
    )
    return values


def define_trained(values: flags.FlagValues) -> None:
    """Defines --train_dir, a run of `tools.train`, and --num_partitions."""
    flags.DEFINE_string(
        "train_dir",
        None,
        "Folder of a training run: its final.keras is taken, or else its "
        "checkpoint.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_partitions",
        1,
        "K, the number of cells, a device each, into which the model is "
        "loaded. Where there is no accelerator, the CPU is split into as many.",
        1,
        flag_values=values,
    )


def define_schedule(values: flags.FlagValues) -> None:
    """Defines --schedule and --remat."""
    flags.DEFINE_enum(
        "schedule",
        "gpipe",
        list(SCHEDULES),
        "Order of the tasks on each device.",
        flag_values=values,
    )
    flags.DEFINE(
        _Rule(),
        "remat",
        "except_last",
        f"What the backward pass recomputes: one of {', '.join(REMAT)}, or the "
        'share of what "never" keeps that is kept, such as 0.4.',
        flag_values=values,
    )


class _Rule(flags.ArgumentParser):
    """Parses a rule of `remat`."""

    def parse(self, argument: object) -> Rule:
        """Returns the rule."""
        return checked_rule(rule_of(str(argument)))


def define_format(values: flags.FlagValues) -> None:
    """Defines --format, the style of a `tools.report.Report`."""
    flags.DEFINE_enum(
        "format",
        "text",
        ["text", "json", "csv"],
        "How to print the tables.",
        flag_values=values,
    )


def run(
    name: str,
    values: flags.FlagValues,
    usage: str | None,
    body: Callable[[flags.FlagValues], None],
    argv: Sequence[str],
) -> int:
    """Parses flags and does a command's work, see `progress.speaking`.

    Args:
        name: Of the command, such as "tfgpipe plan".
        values: Its flags, not parsed yet; they stay so.
        usage: Text of --help before the flags.
        body: Does the work. Errors about what the user gave are `ValueError`,
            `FileNotFoundError`, or `ImportError` for a package that is not
            installed.
        argv: The program and its flags.

    Returns:
        The exit code: 0; 2 for bad flags; 130 after Ctrl-C.
    """
    values = copy.deepcopy(values)  # can be parsed once
    try:
        rest = values(list(argv))[1:]
        if values.help:
            print(_help(values, usage))
            return 0
        if rest:
            raise BadFlags(f"Expected only flags. Received: {rest}.")
        check_finite(values)
        with speaking(name):
            body(values)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (flags.Error, ValueError, FileNotFoundError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


def require(values: flags.FlagValues, *names: str) -> None:
    """Refuses flags that lack some without which there is nothing to do.

    Raises:
        BadFlags: With those that are not given.
    """
    lacking = [f"--{name}" for name in names if values[name].value is None]
    if lacking:
        raise BadFlags(
            f"{' and '.join(lacking)} must be given. --help shows an example."
        )


def output_path(text: str | None) -> pathlib.Path | None:
    """The file of --output, which can be written later; None for none.

    Raises:
        BadFlags: If its folder is missing, before there is work to lose.
    """
    if text is None:
        return None
    path = pathlib.Path(text)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise BadFlags(
            "--output must be a file in a folder that there is. Received: "
            f"--output={text}."
        )
    return path


def check_finite(values: flags.FlagValues) -> None:
    """Refuses flags that are no numbers: a bound lets "nan" through.

    Raises:
        BadFlags: With the first one.
    """
    for name in values:
        given = values[name].value
        numbers = given if isinstance(given, list) else [given]
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
            raise BadFlags(f"--{name} must be finite. Received: {given}.")


def _help(values: flags.FlagValues, usage: str | None) -> str:
    listed = values.get_help(include_special_flags=False)
    # Without the lines that name modules; an entry starts with "  -".
    lines = [line for line in listed.splitlines() if line.startswith("  ")]
    entries = re.split(r"\n(?=  -)", "\n".join(lines))
    entries.sort(key=lambda entry: re.sub(r"\W|no", "", entry.split(":")[0]))
    return "\n".join([usage or "", *entries])
