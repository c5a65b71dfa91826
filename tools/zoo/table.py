"""Writes what the zoo's trials found as a page of Markdown."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Sequence

from tools.zoo.trial import EXACT, K, Row

_HEAD = ("model", "M", "weights", "balance", "step")

_TEXT = """\
# Models

For those who ask whether their kind of model trains as in plain Keras.
Published models, made small, and models with a `call` of their own train in a
`GPipe` of {k} cells, or as many as they have calls: three steps of a mini-batch
of four rows, then `evaluate` and `predict`, in float64, from the same weights,
with TensorFlow's graph optimiser off. Models with batch normalisation, or with
dropout that no argument turns off, have M = 1 here, the others M = 4: with
several micro-batches they differ from Keras [by
design](exactness.md#differences-by-design).

```sh
pip install '.[examples]'
.venv/bin/python -m tools.zoo --output=docs/models.md
```

wrote this page, with {versions};
`models.json` beside it has more columns.

{summary}

* M: micro-batches.
* weights: the largest difference from plain Keras, by the largest value. Where
  that is more than {exact:.0e}, also the difference of plain Keras from itself,
  if it begins with weights whose last bit is another. Models that compute in
  float32 inside do not see that bit.
* balance: cost of the largest cell by that of the mean.
* step: CPU seconds of a `fit` of a later step in one cell, by those of plain
  Keras. Tasks of KerasHub read arrays in 0.05 s less than Keras: that is the 2
  to 3 of the smallest.

## Keras Applications

{applications}

## KerasHub

{kerashub}

## A call of their own

Subclasses of `keras.Model` as guides and examples write them, of
`tools/zoo/own_calls.py`.

{own_calls}

## What does not work

{problems}
"""


def page(
    applications: Sequence[Row],
    kerashub: Sequence[Row],
    own_calls: Sequence[Row],
) -> str:
    """The page."""
    rows = [*applications, *kerashub, *own_calls]
    trained = [row for row in rows if not row.problem]
    exact = [row for row in trained if row.weights <= EXACT]
    same = [row for row in trained if row.is_bit_identical]
    even = [row for row in trained if row.balance <= 1.3]
    whole = [row for row in trained if row.num_micro_batches == 1]
    bits = [r for r in whole if not (r.loss or r.weights or r.outputs)]
    names = ("tensorflow", "keras", "keras-hub")
    failed = [f"* {row.name}: {row.problem}" for row in rows if row.problem]
    return _TEXT.format(
        k=K,
        exact=EXACT,
        versions=", ".join(map(_version, names)),
        summary=textwrap.fill(
            f"Of {len(rows)} models {len(trained)} train; {len(exact)} of them "
            f"with weights that differ by at most {EXACT:.0e}, {len(same)} "
            "bit-identically in two and in K cells, and in "
            f"{len(even)} the largest cell is at most 1.3 of the mean. Of the "
            f"{len(whole)} with M = 1, {len(bits)} have plain Keras's bits.",
            80,
        ),
        applications=_table(applications),
        kerashub=_table(kerashub),
        own_calls=_table(own_calls),
        problems="\n".join(failed) or "None of these fails.",
    )


def _table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(_HEAD) + " |", "| --- " * len(_HEAD) + "|"]
    for row in rows:
        cells = [row.name, *_cells(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    if row.problem:
        return ["fails, see below", *[""] * (len(_HEAD) - 2)]
    last_bit = "" if row.keras is None else f" (Keras {row.keras:.0e})"
    return [
        str(row.num_micro_batches),
        f"{row.weights:.0e}{last_bit}",
        f"{row.balance:.2f}",
        f"{row.step:.2f}",
    ]


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"
