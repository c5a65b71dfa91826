"""The record of a check, which prints as a table."""

from __future__ import annotations

import dataclasses
import math

_MOST = 20  # rows of a table

# What is compared, in the order in which a step comes to it.
KINDS = {
    "forward": "what a layer makes, and the same layer on the host",
    "rows": "micro-batches of a layer, and the whole mini-batch",
    "loss": "loss and gradients of the step of `fit`, and Keras's",
    "update": "weights and slots after it, and by Keras's optimizer",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that differs by more than rounding.

    Attributes:
        kind: Which comparison has shown it: "forward", "rows", "loss" or
            "update".
        where: A layer with its cell and devices, or what else differs.
        difference: How far it is off, as a share of what it should be;
            infinity for what is not finite, of another shape, or of "rows":
            there `what` says it.
        what: What differs, in words.
    """

    kind: str
    where: str
    difference: float
    what: str

    def __str__(self) -> str:
        text = f"{self.kind}: {self.where}: {self.what}"
        if math.isinf(self.difference):
            return text
        return f"{text}, off by {_number(self.difference)}"


class Report:
    """The findings of `tfgpipe.check`. `print` shows tables of them.

    Attributes:
        title: Which step was looked at, in words.
        differences: All that were compared, by kind.
    """

    def __init__(self, title: str):
        self.title = title
        self.differences: dict[str, list[float]] = {}
        self._findings: list[Finding] = []

    def note(
        self,
        kind: str,
        where: str,
        what: str,
        difference: float,
        limit: float = 0.0,
    ) -> None:
        """Takes a comparison, see `Finding`; up to `limit` is rounding."""
        self.differences.setdefault(kind, []).append(difference)
        if difference > limit:
            self._findings.append(Finding(kind, where, difference, what))

    @property
    def findings(self) -> list[Finding]:
        """What differs, kind by kind, and in the order of a training step.

        Forward from the first layer, backward from the last one.
        """
        kinds = [*KINDS]
        return sorted(self._findings, key=lambda f: kinds.index(f.kind))

    @property
    def is_exact(self) -> bool:
        """Returns whether nothing differs."""
        return not self._findings

    @property
    def first(self) -> Finding | None:
        """The first finding, or None."""
        return next(iter(self.findings), None)

    def __str__(self) -> str:
        counts = [
            (kind, str(len(values)), _number(max(values)), KINDS[kind])
            for kind in KINDS
            if (values := self.differences.get(kind))
        ]
        tables = [_table(("compared", "times", "largest", ""), counts)]
        wrong = [
            (f.kind, "", _number(f.difference), f"{f.where}: {f.what}")
            for f in self.findings[:_MOST]
        ]
        if len(self._findings) > _MOST:
            more = f"and {len(self._findings) - _MOST} more"
            wrong.append(("...", "", "", more))
        if wrong:
            tables.append(_table(("wrong", "", "by", ""), wrong))
        end = "Exact: nothing differs by more than rounding."
        if wrong:
            end = f"Not exact. First of all, {self.first}."
        return "\n\n".join([self.title, *tables, end])


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _table(
    header: tuple[str, str, str, str], rows: list[tuple[str, str, str, str]]
) -> str:
    return "\n".join(
        f"{kind:<10}  {count:>5}  {size:>7}  {text}".rstrip()
        for kind, count, size, text in [header, *rows]
    )
