"""Flags of the programs: a line each, and checked before any work is done."""

from collections.abc import Iterable
from typing import Any

from absl import flags

from tfgpipe.commands import command_line
from tools.report import define_format

flags.disclaim_key_flags()  # they are those of the modules that define them


FIGURE = (str, "Write docs/figures/FIGURE.json, for pages.")


def new_flags(rounds: int) -> flags.FlagValues:
    """Makes the flags that every benchmark has."""
    values = command_line.new_flags()
    define_format(values)
    what = "Times to measure everything; medians and quartiles are printed."
    define(values, rounds=(rounds, what), figure=FIGURE)
    return values


def define(values: flags.FlagValues, **described: tuple) -> None:
    """Defines flags by name: (default, meaning), and a bound or choices.

    A default that is a type stands for none. A number is at least the bound: 1
    for integers and 0 for others, unless it is given; None is no bound. Lists
    are written with commas, of numbers or of names.

    Example:

    >>> values = flags.FlagValues()
    >>> define(values, k=([1, 2], "Cells."), seconds=(float, "At most."))
    >>> rest = values(["program", "--k=3,4"])
    >>> values.k, values.seconds
    ([3, 4], None)
    """
    for name, (default, meaning, *given) in described.items():
        kind = default if isinstance(default, type) else type(default)
        start = None if isinstance(default, type) else default
        if kind in (bool, str) and not given:
            make = flags.DEFINE_boolean if kind is bool else flags.DEFINE_string
            make(name, start, meaning, flag_values=values)
        elif kind is str:
            flags.DEFINE_enum(
                name, start, list(given[0]), meaning, flag_values=values
            )
        elif kind in (int, float):
            bound = given[0] if given else int(kind is int)
            make = flags.DEFINE_integer if kind is int else flags.DEFINE_float
            make(name, start, meaning, bound, flag_values=values)
        else:
            _define_list(values, name, list(default), meaning, *given)


def _define_list(
    values: flags.FlagValues,
    name: str,
    default: list,
    meaning: str,
    given: Any = None,
) -> None:
    if not isinstance(default[0], str):
        kind = type(default[0])
        bound = int(kind is int) if given is None else given
        parser: flags.ArgumentParser = _Numbers(bound, kind)
    elif given is None:
        flags.DEFINE_list(name, default, meaning, flag_values=values)
        return
    else:
        parser = _Choices(given)
        meaning = f"{meaning} Of: {', '.join(given)}."
    flags.DEFINE(
        parser,
        name,
        ",".join(map(str, default)),
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
        """Returns what absl calls it."""
        return f"list of {self._kind.__name__}"


class _Choices(flags.ArgumentParser):
    """Parses names with commas between them."""

    def __init__(self, choices: Iterable[str]) -> None:
        self._choices = list(choices)

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
        """Returns what absl calls it."""
        return "list of names"
