"""What a benchmark prints: tables, and the machine they were made on."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags

from tfgpipe.commands.command_line import progress
from tools import figures


class Spread(NamedTuple):
    """The middle of some measurements, and half of them around it.

    Attributes:
        median: Half of the measurements are smaller.
        low: A quarter of the measurements are smaller.
        high: A quarter of the measurements are larger.
    """

    median: float
    low: float
    high: float

    def times(self, factor: float) -> "Spread":
        """In another unit."""
        return Spread(*(factor * value for value in self))


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles.

    Example:

    >>> spread([4.0, 1.0, 2.0, 3.0, 9.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        key: Its name in rows and JSON.
        heading: Its name in text.
        format: Of its values in text, as for `format`.
    """

    key: str
    heading: str
    format: str = ""


def columns(text: str) -> list[Column]:
    """Makes columns from text: "key: heading: format", with | between them.

    The heading is the key if it is left out. A key after a star is that of a
    `Spread`, which `spread_values` fills, and has three columns.

    Example:

    >>> [c.heading for c in columns("model | k: K | *ms: step ms: .1f")]
    ['model', 'K', 'step ms', '25%', '75%']
    """
    found = []
    for part in text.split("|"):
        key, *others = (word.strip() for word in part.split(":", 2))
        heading, style = [*others, "", ""][:2]
        column = Column(key.removeprefix("*"), heading or key, style)
        found.append(column)
        if key.startswith("*"):
            ends = ("low", "25%"), ("high", "75%")
            found += [
                Column(f"{column.key}_{end}", what, style) for end, what in ends
            ]
    return found


def spread_values(key: str, values: Spread) -> dict[str, float]:
    """The values of a row for the columns of a `Spread`."""
    return {
        key: values.median,
        f"{key}_low": values.low,
        f"{key}_high": values.high,
    }


@dataclasses.dataclass
class Table:
    """One table of a report.

    Attributes:
        name: One word, for JSON.
        title: What the table shows and how it was measured.
        columns: The columns that are shown in text, in order.
        rows: Values by column; a missing one is shown as a dash. Values
            without a column are in JSON only.
        notes: Lines below the table.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        """The table for people."""
        lines = [[c.heading for c in self.columns]]
        lines += [[_text(row, c) for c in self.columns] for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines)]
        is_text = [
            any(isinstance(row.get(c.key), str) for row in self.rows)
            for c in self.columns
        ]
        aligned = [
            "  ".join(
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, left in zip(line, widths, is_text)
            ).rstrip()
            for line in lines
        ]
        aligned.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, "", *aligned, *self.notes])


def _text(row: dict[str, Any], column: Column) -> str:
    value = row.get(column.key)
    if value is None:
        return "-"
    return str(value) if isinstance(value, str) else f"{value:{column.format}}"


class Report:
    """The tables of one run.

    Args:
        command: The sub-command that makes them.
        style: "text" or "json".
    """

    def __init__(self, command: str, style: str) -> None:
        self._command = command
        self._style = style
        self._tables: list[Table] = []

    def add(self, table: Table) -> Table:
        """Adds a table, which may get its rows later."""
        self._tables.append(table)
        return table

    def print(self) -> None:
        """Prints everything to the standard output."""
        tables = [table for table in self._tables if table.rows]
        make = _as_json if self._style == "json" else _as_text
        print(make(self._command, environment(), tables))

    def write(self, name: str, command: str) -> None:
        """Writes each table for pages, see `tools.figures`."""
        where = environment()
        head = {
            "command": command,
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "machine": f"{where['machine']}, {where['cores']} cores",
            "versions": ", ".join(
                f"{key} {where[key]}" for key in ("tensorflow", "keras")
            ),
        }
        tables = [table for table in self._tables if table.rows]
        for table in tables:
            suffix = f"_{table.name}" if len(tables) > 1 else ""
            figures.write(
                name + suffix,
                {"title": table.title, **head, "notes": table.notes},
                [column.heading for column in table.columns],
                [[_text(row, c) for c in table.columns] for row in table.rows],
            )


def commit() -> str:
    """Returns the commit of this checkout; "" where git does not tell it."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    root = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def _as_text(_: str, where: dict[str, Any], tables: list[Table]) -> str:
    width = max(map(len, where))
    head = [f"{key:{width}}  {value}" for key, value in where.items()]
    parts = ["\n".join(head), *(table.text() for table in tables)]
    return "\n\n".join(parts)


def _as_json(command: str, where: dict[str, Any], tables: list[Table]) -> str:
    made = {
        "command": command,
        "environment": where,
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "rows": [_plain(row) for row in table.rows],
                "notes": table.notes,
            }
            for table in tables
        ],
    }
    return json.dumps(made, indent=2)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers without digits that mean nothing."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def environment() -> dict[str, Any]:
    """Versions and machine. Imports no TensorFlow, starts no device."""
    return {
        "tensorflow": _version("tensorflow"),
        "keras": _version("keras"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": _processor(),
        "cores": _cores(),
        "load": " ".join(f"{value:.2f}" for value in _load()),
    }


def _version(package: str) -> str:
    """Of an installed package, by the name it is imported by."""
    # TensorFlow has several distributions, tensorflow-cpu among them.
    known = importlib.metadata.packages_distributions().get(package, [])
    return importlib.metadata.version(known[0]) if known else "unknown"


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load() -> Sequence[float]:
    """How busy the machine was for 1, 5 and 15 minutes, where it says so."""
    return os.getloadavg() if hasattr(os, "getloadavg") else ()


def median_of(measure: Callable[[], float], rounds: int) -> float:
    """The median of some calls, after two that trace and do not count."""
    for _ in range(2):
        measure()
    return statistics.median(measure() for _ in range(rounds))


def alternated(
    measures: Sequence[Callable[[], float]], rounds: int, what: str
) -> list[list[float]]:
    """Measures some things in turns; every other time, the last goes first."""
    found: list[list[float]] = [[] for _ in measures]
    pairs = list(zip(measures, found))
    for turn in progress(range(rounds), what):
        for measure, own in pairs if turn % 2 else reversed(pairs):
            own.append(measure())
    return found


def define_format(values: flags.FlagValues) -> None:
    """Defines --format, the style of a `Report`."""
    flags.DEFINE_enum(
        "format",
        "text",
        ["text", "json"],
        "How to print the tables.",
        flag_values=values,
    )
