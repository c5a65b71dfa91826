"""The record of a check, which prints as a table."""

from __future__ import annotations

import dataclasses
import math

_MOST = 20  # rows of a table

# What is compared, in the order in which a step comes to it.
KINDS = {
    "forward": "what a layer makes, and the same layer on the host",
    "rows": "micro-batches of a layer, and the whole mini-batch",
    "gradient": "loss and gradients of the step of `fit`, and the host's",
    "loss": "loss and gradients of the host's, and Keras's",
    "update": "weights and slots after it, and by Keras's optimizer",
    "state": "other variables after it, and the host's",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that differs by more than rounding.

    Attributes:
        kind: Which comparison has shown it: "forward", "rows", "gradient",
            "loss", "update" or "state".
        where: A layer with its cell and devices, or what else differs.
        difference: How far it is off, as a share of what it should be;
            infinity for what is not finite, of another shape, or of "rows":
            there `what` says it.
        what: What differs, in words.
        is_documented: Whether the guide says that it differs.
    """

    kind: str
    where: str
    difference: float
    what: str
    is_documented: bool = False

    def __str__(self) -> str:
        text = f"{self.kind}: {self.where}: {self.what}"
        if math.isinf(self.difference):
            return text
        return f"{text}, off by {_number(self.difference)}"


@dataclasses.dataclass(frozen=True)
class Compared:
    """The number of comparisons of a kind, and the largest difference.

    Attributes:
        kind: As a `Finding` has it.
        count: How many comparisons there were.
        largest: The largest difference; documented ones are left out.
    """

    kind: str
    count: int
    largest: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of `tfgpipe.check`. `print` shows tables of them.

    Attributes:
        title: Which step was looked at, in words.
        compared: What was compared.
        findings: What differs, kind by kind, and in the order of a training
            step: forward from the first layer, backward from the last one.
    """

    title: str
    compared: tuple[Compared, ...]
    findings: tuple[Finding, ...]

    @property
    def is_exact(self) -> bool:
        """Returns whether nothing differs but what is documented."""
        return self.first is None

    @property
    def first(self) -> Finding | None:
        """The first finding that is not documented, or None."""
        return next((f for f in self.findings if not f.is_documented), None)

    def __str__(self) -> str:
        counts = [
            (c.kind, str(c.count), _number(c.largest), KINDS[c.kind])
            for c in self.compared
        ]
        parts = [_table(("compared", "times", "largest", ""), counts)]
        for is_documented in (True, False):
            chosen = [
                f for f in self.findings if f.is_documented == is_documented
            ]
            title = "documented" if is_documented else "wrong"
            rows = [
                (f.kind, "", _number(f.difference), f"{f.where}: {f.what}")
                for f in chosen[:_MOST]
            ]
            if len(chosen) > _MOST:
                rows.append(("...", "", "", f"and {len(chosen) - _MOST} more"))
            if rows:
                parts.append(_table((title, "", "by", ""), rows))
        end = "Exact: nothing else differs by more than rounding."
        if self.first is not None:
            end = f"Not exact. First of all, {self.first}."
        return "\n\n".join([self.title, *parts, end])


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _table(
    header: tuple[str, str, str, str], rows: list[tuple[str, str, str, str]]
) -> str:
    return "\n".join(
        f"{kind:<10}  {count:>5}  {size:>7}  {text}".rstrip()
        for kind, count, size, text in [header, *rows]
    )


class Tally:
    """Takes comparisons, one after the other, and makes the report of them."""

    def __init__(self) -> None:
        self._differences: dict[str, list[float]] = {k: [] for k in KINDS}
        self._findings: list[Finding] = []

    def note(
        self,
        kind: str,
        where: str,
        what: str,
        difference: float,
        limit: float = 0.0,
        is_documented: bool = False,
    ) -> None:
        """Takes a comparison, see `Finding`; up to `limit` is rounding."""
        finding = Finding(kind, where, difference, what, is_documented)
        self._findings += [finding] * (difference > limit)
        self._differences[kind].append(0.0 if is_documented else difference)

    def report(self, title: str) -> Report:
        """Returns all comparisons and findings so far."""
        compared = [
            Compared(kind, len(differences), max(differences))
            for kind, differences in self._differences.items()
            if differences
        ]
        findings = sorted(self._findings, key=lambda f: [*KINDS].index(f.kind))
        return Report(title, tuple(compared), tuple(findings))
