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
    "steps",
    "loss",
    "weights",
    "outputs",
    "last bit",
    "bits",
    "balance",
    "KB a row",
    "first step",
    "step",
)

_TEXT = """\
# Models

Published models, made small, and models with a `call` of their own, as they
train in a `GPipe` of {k} cells: three steps of a mini-batch of four rows, then
`evaluate` and `predict`, in float64, beside plain Keras from the same weights;
see [functional models](your_model.md#functional-models). Models with batch
normalisation, or with dropout that no argument turns off, have M = 1 here, the
others M = 4: with several micro-batches they differ from Keras [by
design](exactness.md#differences-by-design). Those of KerasHub need
`pip install '.[examples]'`. This page is what

```sh
.venv/bin/python -m tools.zoo --output=docs/models.md
```

wrote, with {versions}.

{summary}

* [Keras Applications](#keras-applications)
* [KerasHub](#kerashub)
* [A call of their own](#a-call-of-their-own)
* [What does not work](#what-does-not-work)

In the tables:

* K: cells, at most as many as the model has steps. M: micro-batches.
* steps: calls of layers and operations, between which cells may begin.
* loss, weights, outputs: the largest difference from plain Keras, relative for
  losses; for variables, and for the outputs of `predict`, by the largest value.
  Differences of outputs such as 0 or 2e-254 are those of a saturated softmax,
  whose outputs are 0 or 1: they say nothing, the weights do.
* last bit: where the weights differ by more than {exact:.0e}, by how much those
  of plain Keras differ if it begins with weights whose last bit is another.
  Some models compute in float32 inside, which does not see that bit.
* bits: whether two and K cells give the same weights to the last bit.
* balance: cost of the largest cell by that of the mean.
* KB a row: what crosses from each cell to the next.
* first step: CPU seconds until it is done, by those of plain Keras.
* step: CPU seconds of a `fit` of one later step in one cell, by those of plain
  Keras. Reading the data is part of it. Tasks of KerasHub read arrays otherwise
  than Keras, in 0.05 s less: that is the 2 to 3 of the smallest of them.

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
    """The page.

    Args:
        applications: What was found of `keras.applications`.
        kerashub: Of KerasHub.
        own_calls: Of models with a call of their own.
    """
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
        str(row.num_steps),
        f"{row.loss:.0e}",
        f"{row.weights:.0e}",
        f"{row.outputs:.0e}",
        "" if row.keras is None else f"{row.keras:.0e}",
        "same" if row.is_bit_identical else "differ",
        f"{row.balance:.2f}",
        " ".join(f"{size:g}" for size in row.kilobytes),
        f"{row.first_step:.1f}",
        f"{row.step:.2f}",
    ]


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"
