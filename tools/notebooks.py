"""Makes notebooks of pages: text and code, without outputs.

    python -m tools.notebooks

A notebook begins with a cell that installs the checkout around it.
"""

import json
import pathlib
import re
import sys
from typing import Any

from tfgpipe.files import write_text

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
# Each with what its first cell runs.
NOTEBOOKS = {
    "tutorial": ("docs/tutorial.md", "%pip install --quiet '..[cpu]'"),
    "devices": (
        "docs/notebook.md",
        "# On a TPU VM: '..[tpu]'\n%pip install --quiet '..[gpu]'",
    ),
}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)


def notebook(page: str, install: str) -> dict[str, Any]:
    """The notebook of a page, as JSON.

    Blocks of Python become code; what they print is left out; all else is text.
    """
    cells = [_cell("code", install)]
    text = _without_list((ROOT / page).read_text("utf-8"))
    place = 0
    for block in _BLOCK.finditer(text):
        cells.append(_cell("markdown", text[place : block.start()]))
        place = block.end()
        if block[1] == "python":
            cells.append(_cell("code", block[2]))
        elif block[1] != "text":
            cells.append(_cell("markdown", block[0]))
    cells.append(_cell("markdown", text[place:]))
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _without_list(text: str) -> str:
    """A page without the list of its chapters, to which no link leads here."""
    return re.sub(r"^(\* \[[^\]]*\]\(#[^)]*\)\n)+", "", text, flags=re.M)


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    else:  # links lead from another folder
        text = re.sub(r"\]\((?!https?:|\.\./|#)", "](../docs/", text)
    return {**cell, "source": text.strip().splitlines(keepends=True)}


def written(name: str) -> str:
    """What the file of a notebook has to hold."""
    return json.dumps(notebook(*NOTEBOOKS[name]), indent=1) + "\n"


def main() -> int:
    """Writes all notebooks."""
    FOLDER.mkdir(exist_ok=True)
    for name in NOTEBOOKS:
        write_text(FOLDER / f"{name}.ipynb", written(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
