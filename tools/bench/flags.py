"""Flags of the benchmarks: each sub-command has a set of its own.

Lists are written with commas; every value is checked before any work is done.
"""

from collections.abc import Iterable
from typing import Any

from absl import flags

from tfgpipe.commands import command_line
from tools.report import define_format


def new_flags(rounds: int) -> flags.FlagValues:
    """The flags that every sub-command has.

    Args:
        rounds: Default of --rounds.
    """
    values = command_line.new_flags()
    define_format(values)
    flags.DEFINE_integer(
        "rounds",
        rounds,
        "Times to measure everything; medians and quartiles are printed.",
        1,
        flag_values=values,
    )
    return values


def define_numbers(
    values: flags.FlagValues,
    name: str,
    default: Iterable[float],
    meaning: str,
    minimum: float = 1,
    kind: type = int,
) -> None:
    """Defines a flag for a list of numbers.

    Args:
        values: Where to define it.
        name: Of the flag.
        default: The numbers without the flag.
        meaning: For --help.
        minimum: The least that is allowed.
        kind: `int` or `float`.
    """
    _define(values, _Numbers(minimum, kind), name, default, meaning)


def define_choices(
    values: flags.FlagValues,
    name: str,
    default: Iterable[str],
    choices: Iterable[str],
    meaning: str,
) -> None:
    """Defines a flag for a list of names.

    Args:
        values: Where to define it.
        name: Of the flag.
        default: The names without the flag.
        choices: The names that are allowed.
        meaning: For --help.
    """
    choices = list(choices)
    meaning = f"{meaning} Of: {', '.join(choices)}."
    _define(values, _Choices(choices), name, default, meaning)


def _define(
    values: flags.FlagValues,
    parser: flags.ArgumentParser,
    name: str,
    default: Iterable[Any],
    meaning: str,
) -> None:
    text = ",".join(str(value) for value in default)
    flags.DEFINE(
        parser,
        name,
        text,
        meaning,
        flag_values=values,
        serializer=flags.CsvListSerializer(","),
    )


class _Numbers(flags.ArgumentParser):
    """Parses numbers with commas between them."""

    def __init__(self, minimum: float, kind: type) -> None:
        self._minimum = minimum
        self._kind = kind

    def parse(self, argument: str) -> list:
        """Returns the numbers."""
        try:
            numbers = [self._kind(item) for item in argument.split(",")]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < self._minimum:
            kind = "integers" if self._kind is int else "numbers"
            raise ValueError(
                f"Expected {kind} with commas between them, each at least "
                f"{self._minimum}. Received: {argument!r}."
            )
        return numbers

    def flag_type(self) -> str:
        """What absl calls it."""
        return f"list of {self._kind.__name__}"


class _Choices(flags.ArgumentParser):
    """Parses names with commas between them."""

    def __init__(self, choices: list[str]) -> None:
        self._choices = choices

    def parse(self, argument: str) -> list[str]:
        """Returns the names."""
        names = argument.split(",")
        if unknown := [name for name in names if name not in self._choices]:
            raise ValueError(
                f"Expected names of {', '.join(self._choices)}, with commas "
                f"between them. Received: {argument!r}, of which unknown: "
                f"{unknown}."
            )
        return names

    def flag_type(self) -> str:
        """What absl calls it."""
        return "list of names"
