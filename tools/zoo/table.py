"""Writes what the zoo's trials found as a page of Markdown."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Sequence

from tools.zoo.trial import EXACT, K, Row

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

`weights` is the largest difference of a weight from plain Keras, by the largest
value. Where it is more than {exact:.0e}, it is printed, and in parentheses the
difference of plain Keras from itself, if it begins with weights whose last bit
is another; models that compute in float32 inside do not see that bit. The
number after a model is the time of a later step of `fit` in one cell by that of
plain Keras, in CPU seconds. Tasks of KerasHub read arrays in 0.05 s less than
Keras: that is the 2 to 3 of the smallest.

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
    """Returns a table of models, in groups that differ equally from Keras."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        group, name = _group_and_name(row)
        groups.setdefault(group, []).append(name)
    lines = ["| weights | models, with the time of a step |", "| --- | --- |"]
    lines += [
        f"| {group} | {', '.join(names)} |" for group, names in groups.items()
    ]
    return "\n".join(lines)


def _group_and_name(row: Row) -> tuple[str, str]:
    if row.problem:
        return "fails, see below", row.name
    name = f"{row.name} {row.step:.2f}"
    if row.weights > EXACT:
        last_bit = "" if row.keras is None else f" (Keras {row.keras:.0e})"
        return "more", f"{name}: {row.weights:.0e}{last_bit}"
    m = f"M = {row.num_micro_batches}"
    return (f"within {EXACT:.0e}, {m}" if row.weights else f"equal, {m}"), name


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"
