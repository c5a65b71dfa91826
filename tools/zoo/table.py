"""Writes what the zoo's trials found as a page of Markdown."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Sequence

from tools.zoo.trial import EXACT, K, Row

_HEAD = (
    "model",
    "K",
    "M",
    "weights",
    "last bit",
    "balance",
    "first step",
    "step",
)

_TEXT = """\
# Models

For those who ask whether their kind of model trains as in plain Keras.
Published models, made small, and models with a `call` of their own train in a
`GPipe` of {k} cells: three steps of a mini-batch of four rows, then `evaluate`
and `predict`, in float64, from the same weights. Models with batch
normalisation, or with dropout that no argument turns off, have M = 1 here, the
others M = 4: with several micro-batches they differ from Keras [by
design](exactness.md#differences-by-design). This page is what

```sh
pip install '.[examples]'
.venv/bin/python -m tools.zoo --output=docs/models.md
```

wrote, with {versions}. `models.json`
beside it has more columns.

{summary}

* [Keras Applications](#keras-applications)
* [KerasHub](#kerashub)
* [A call of their own](#a-call-of-their-own)
* [What does not work](#what-does-not-work)

The columns:

* K: cells, at most as many as the model has calls. M: micro-batches.
* weights: the largest difference from plain Keras, by the largest value.
* last bit: where that is more than {exact:.0e}, the difference of plain Keras
  from itself, if it begins with weights whose last bit is another. Models that
  compute in float32 inside do not see that bit.
* balance: cost of the largest cell by that of the mean.
* first step, step: CPU seconds until the first step is done, and of a `fit` of
  a later one in one cell, by those of plain Keras. Tasks of KerasHub read
  arrays in 0.05 s less than Keras: that is the 2 to 3 of the smallest.

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
    return [
        str(row.num_cells),
        str(row.num_micro_batches),
        f"{row.weights:.0e}",
        "" if row.keras is None else f"{row.keras:.0e}",
        f"{row.balance:.2f}",
        f"{row.first_step:.1f}",
        f"{row.step:.2f}",
    ]


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"
