"""Figures of the pages: each has one source, a JSON file in docs/figures.

    python -m tools.figures

writes the tables of the pages from the files. In a page a table stands between
`<!-- figure: NAME -->` and `<!-- /figure -->`. A number elsewhere is followed
by its file, its row and its column, `1.02<!-- NAME; K=8; M=32: ratio -->`, and
may have fewer digits. A benchmark writes its file for `--figure=NAME`.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

from tfgpipe.commands import command_line
from tfgpipe.files import write_text

FLAGS = command_line.new_flags()
_ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = _ROOT / "docs" / "figures"
_TABLE = re.compile(
    r"(<!-- figure: (\w+) -->\n).*?(<!-- /figure -->)", re.DOTALL
)
_QUOTE = re.compile(r"([-+\d.,]+%?)<!-- (\w+); ([^>]*?): ([^>:]+?) -->")
_HIDDEN = {"25%", "75%", "others"}


def write(
    name: str, head: dict[str, Any], columns: list[str], rows: list[list[str]]
) -> pathlib.Path:
    """Writes a file, a row a line: what `head` says, and the table.

    A heading that is there already begins with the one before it.
    """
    pairs = zip(["", *columns], columns)
    columns = [
        f"{before} {heading}" if heading in columns[:index] else heading
        for index, (before, heading) in enumerate(pairs)
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    first = json.dumps({**head, "columns": columns}, indent=1)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    body = ",\n  ".join(lines)
    write_text(path, f'{first[:-2]},\n "rows": [\n  {body}\n ]\n}}\n')
    return path


def read(name: str) -> dict[str, Any]:
    """Returns what a file says."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def pages() -> list[pathlib.Path]:
    """Returns the files that may have figures."""
    return [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]


def with_tables(text: str) -> str:
    """Returns a page with its tables as the files have them."""
    return _TABLE.sub(lambda m: m[1] + markdown(read(m[2])) + m[3], text)


def markdown(figure: dict[str, Any]) -> str:
    """Returns a table for a page and its caption, quartiles left out.

    The caption says what is the same in all rows.
    """
    columns, rows = figure["columns"], figure["rows"]
    same = [
        i
        for i, cells in enumerate(zip(*rows))
        if len(rows) > 1 and len(set(cells)) == 1
    ]
    shown = [
        i
        for i, name in enumerate(columns)
        if name not in _HIDDEN and i not in same
    ]
    lines = [columns, ["---"] * len(columns), *rows]
    table = [f"| {' | '.join(line[i] for i in shown)} |" for line in lines]
    fixed = [
        f"{name}: {rows[0][i]}"
        for i, name in enumerate(columns)
        if i in same and name not in _HIDDEN
    ]
    words = [figure["title"], ", ".join(fixed), *figure["notes"]]
    words.append(f"Measured at `{figure['commit']}`")
    caption = ". ".join(text.rstrip(".") for text in words if text)
    return "\n".join([*table, "", f"{caption}.", ""])


def wrong_quotes(text: str) -> Iterator[str]:
    """Yields the numbers of a page that differ from what they name."""
    for number, name, row, column in _QUOTE.findall(text):
        figure = read(name)
        wanted = dict(part.split("=", 1) for part in row.split("; "))
        rows = [dict(zip(figure["columns"], r)) for r in figure["rows"]]
        cells = {r[column] for r in rows if wanted.items() <= r.items()}
        if {_rounded(cell, number) for cell in cells} != {number}:
            yield f"{number} of {name}; {row}: {column} is {sorted(cells)}"


def _rounded(cell: str, number: str) -> str:
    """Returns a cell with as many decimals as a number of a page has."""
    unit = "%" * cell.endswith("%")
    decimals = len(number.removesuffix("%").partition(".")[2])
    value = float(cell.removesuffix("%").replace(",", ""))
    return f"{value:{',' * (',' in number)}.{decimals}f}{unit}"


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.figures", FLAGS, __doc__, _write, argv)


def _write(values: flags.FlagValues) -> None:
    """Writes the tables into the pages."""
    for page in pages():
        text = page.read_text("utf-8")
        if (new := with_tables(text)) != text:
            write_text(page, new)
            print(f"Wrote the tables of {page.relative_to(_ROOT)}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
