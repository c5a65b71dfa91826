"""What a check has found, as a record that prints as a table.

How far numbers are apart is said as:

    outputs      the largest difference, as a share of the largest value
    gradients    the sum of all differences, as a share of the sum of all values
    changes      the largest difference, as a share of the largest change

Gradients jump: where a value is zero but for rounding, `relu` lets the gradient
through on one device and not on the other. That is much for one value, and next
to nothing for the sum.

Limit: what is rounding is a guess by the dtype and the kind of device. Matrix
products of accelerators round their factors first, NVIDIA's to 11 bits unless
`tf.config.experimental.enable_tensor_float_32_execution(False)` forbids it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_MOST = 20  # rows of a table

# What is compared, in the order in which a step comes to it.
KINDS = {
    "forward": "what a layer makes, and the same layer on the host",
    "transfer": "what a layer hands on, and what the next one gets",
    "rows": "micro-batches of a layer, and the whole mini-batch",
    "loss": "the loss and where its gradients start, and Keras's",
    "gradient": "gradients with respect to inputs and weights, and the host's",
    "step": "the step in the graph of `fit`, and by layers",
    "update": "weights and slots after it, and by Keras's optimizer",
    "state": "other variables after it, and by the host's micro-batches",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that differs by more than rounding.

    Attributes:
        kind: Which comparison has shown it: "forward", "transfer", "rows",
            "loss", "gradient", "step", "update" or "state".
        where: A layer with its cell and devices, or two of them.
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
        found = f"{self.kind}: {self.where}: {self.what}"
        if math.isinf(self.difference):
            return found
        return f"{found}, off by {_number(self.difference)}"


@dataclasses.dataclass(frozen=True)
class Compared:
    """What was compared, all in all.

    Attributes:
        kind: As that of a `Finding`.
        count: How many comparisons there were.
        largest: The largest difference, that of documented ones left out.
    """

    kind: str
    count: int
    largest: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What `tfgpipe.check` has found. `print` shows tables of it.

    Attributes:
        title: Which step was looked at, in words.
        compared: What was compared.
        findings: What differs, in the order of a training step: forward from
            the first layer, backward from the last one.
    """

    title: str
    compared: tuple[Compared, ...]
    findings: tuple[Finding, ...]

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs but what is documented."""
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
            own = [f for f in self.findings if f.is_documented == is_documented]
            title = "documented" if is_documented else "wrong"
            rows = [
                (f.kind, "", _number(f.difference), f"{f.where}: {f.what}")
                for f in own[:_MOST]
            ]
            if len(own) > _MOST:
                rows.append(("...", "", "", f"and {len(own) - _MOST} more"))
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
        self._counts = dict.fromkeys(KINDS, 0)
        self._largest = dict.fromkeys(KINDS, 0.0)
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
        """Takes a comparison, see `Finding`.

        What differs by up to `limit` is rounding.
        """
        self._counts[kind] += 1
        if difference > limit:
            self._findings.append(
                Finding(kind, where, difference, what, is_documented)
            )
        if not is_documented:
            self._largest[kind] = max(self._largest[kind], difference)

    def report(self, title: str) -> Report:
        """All comparisons and findings so far, as what the user gets."""
        compared = [
            Compared(kind, count, self._largest[kind])
            for kind, count in self._counts.items()
            if count
        ]
        return Report(title, tuple(compared), tuple(self._findings))


# By dtype, from where on numbers of a layer differ by more than rounding, and
# the distance from 1 to the next number.
_ROUNDING = {
    "float64": (1e-10, 2.0**-52),
    "float32": (2e-4, 2.0**-23),
    "float16": (1e-2, 2.0**-10),
    "bfloat16": (5e-2, 2.0**-7),
}

_ELEVEN_BITS = 5e-3  # float32, where factors are rounded

# Gradients of weights that are this share of the largest of all are zero but
# for rounding, as that of the bias of the keys of an attention. Those of
# inputs are, if they are that share of those of outputs.
_TINY = 1e-5

_TINY_DX = 1e-6

_UNITS_IN_LAST_PLACE = 8


def limit_of(dtypes: Iterable[str], device: str = "/device:CPU:0") -> float:
    """From where on what is computed in some dtypes on a device is wrong."""
    coarsest = _ROUNDING["bfloat16"][0]
    found = [_ROUNDING.get(name, (coarsest,))[0] for name in dtypes]
    kind = device.split(":")[-2]
    if kind == "TPU":
        found.append(coarsest)
    elif kind == "GPU" and _rounds_factors():
        found.append(_ELEVEN_BITS)
    return max(found, default=_ROUNDING["float32"][0])


def _rounds_factors() -> bool:
    return tf.config.experimental.tensor_float_32_execution_enabled()


def as_array(tensor: Any) -> np.ndarray:
    """The numbers of a tensor, dense, in double precision."""
    tensor = tf.convert_to_tensor(tensor)  # of slices, too
    if tensor.dtype == tf.string:
        return np.asarray(tensor.numpy())
    wide = "complex128" if tensor.dtype.is_complex else "float64"
    return np.asarray(tensor.numpy()).astype(wide)


def largest(tensor: Any) -> float:
    """The largest absolute value of a tensor; NaN if one is."""
    array = as_array(tensor)
    return float(np.max(np.abs(array))) if array.size else 0.0


def are_finite(tensors: Iterable[Any]) -> bool:
    """Whether all numbers of some tensors are; None are skipped."""
    return all(math.isfinite(largest(t)) for t in tensors if t is not None)


def of_outputs(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """How far tensors are apart, as a share of the largest of each."""
    return _worst(found, expected, _of_largest)


def of_gradients(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """How far gradients are apart, as a share of the sum of each."""
    return _worst(found, expected, _of_sum)


def without_tiny(compared: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Without gradients of weights that are zero but for rounding.

    Each tuple begins with two gradients, of which either may be None.
    """
    sizes = [max(map(_size, pair[:2])) for pair in compared]
    floor = _TINY * max(sizes, default=0.0)
    return [
        pair for pair, size in zip(compared, sizes) if size and not size < floor
    ]


def _size(gradient: Any) -> float:
    return 0.0 if gradient is None else largest(gradient)


def compared_dx(
    found: Mapping[int, Any],
    expected: Mapping[int, Any],
    dy: Mapping[Any, Any],
) -> tuple[list[Any], list[Any]]:
    """Gradients by inputs, without those that are zero but for rounding.

    All are by position; `dy` are those by outputs.
    """
    floor = _TINY_DX * max(map(largest, dy.values()), default=0.0)
    places = [
        i
        for i in expected
        if not max(largest(found[i]), largest(expected[i])) < floor
    ]
    return [found[i] for i in places], [expected[i] for i in places]


def of_change(
    found: Any, expected: Any, before: Any, scale: float = 0.0
) -> float:
    """How far a new value is from what it should be.

    As a share of the largest change that it should have seen. Where that is
    nothing but rounding, of that. `scale` is the largest of the numbers that it
    was computed from: it may be zero but for their rounding.
    """
    name = tf.convert_to_tensor(before).dtype.name
    found, expected, before = map(as_array, (found, expected, before))
    if not expected.size or np.array_equal(found, expected, equal_nan=True):
        return 0.0
    if name not in _ROUNDING:
        return math.inf  # integers are not rounded
    limit, unit = _ROUNDING[name]
    size = max(np.max(np.abs(expected)), scale)
    rounding = _UNITS_IN_LAST_PLACE * unit * size
    # So that a difference of mere rounding comes to `limit` at most.
    change = max(np.max(np.abs(expected - before)), rounding / limit)
    return _share(np.max(np.abs(found - expected)), change)


def _worst(found: Sequence[Any], expected: Sequence[Any], of: Any) -> float:
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            worst = max(worst, 0.0 if a is b else math.inf)
            continue
        a, b = as_array(a), as_array(b)
        if a.shape != b.shape:
            return math.inf
        if a.dtype.kind == "O" or not np.array_equal(a, b, equal_nan=True):
            worst = max(worst, of(a, b))
    return worst


def _of_largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind == "O":  # strings
        return 0.0 if np.array_equal(a, b) else math.inf
    a, b = _without_equal_infinities(a, b)
    return _share(np.max(np.abs(a - b)), np.max(np.abs(b)))


def _of_sum(a: np.ndarray, b: np.ndarray) -> float:
    return _share(np.sum(np.abs(a - b)), np.sum(np.abs(b)))


def _without_equal_infinities(
    a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What is not finite alike, as a mask of -inf, differs by nothing."""
    alike = ~np.isfinite(b) & ((a == b) | (np.isnan(a) & np.isnan(b)))
    return np.where(alike, 0, a), np.where(alike, 0, b)


def _share(part: float, whole: float) -> float:
    """A difference as a share; infinity for what is not finite."""
    if not math.isfinite(part):
        return math.inf
    return float(part / whole) if whole else math.inf
