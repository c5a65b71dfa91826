"""How far tensors are apart, and what of that is rounding.

    outputs      the largest difference, as a share of the largest value
    gradients    the sum of all differences, as a share of the sum of all values
    changes      the largest difference, as a share of the largest change

Gradients of two devices jump: where a value is zero but for rounding, `relu`
lets the gradient through on one and not on the other. That is much for one
value, and next to nothing for the sum.

Limit: what is rounding is a guess by the dtype and the kind of device. Matrix
products of accelerators round their factors first, NVIDIA's to 11 bits unless
`tf.config.experimental.enable_tensor_float_32_execution(False)` forbids it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.graphs import as_tensor, is_continuous

# Of the largest number, by bytes.
_ROUNDING = {1: 1e-1, 2: 3e-2, 4: 2e-4, 8: 1e-8}

# From 1 to the next number, by bytes: by so much each sum may be rounded.
_EPSILON = {1: 2**-3, 2: 2**-7, 4: 2**-23, 8: 2**-52}

# Of the largest number that is taken.
CANCELLED = {1: 1e-1, 2: 3e-2, 4: 1e-5, 8: 2e-14}

_ELEVEN_BITS = 5e-3  # float32, where factors are rounded

# A new value is as it should be but for so many times the smallest difference.
_UNITS_IN_LAST_PLACE = 8


def limit_of(dtypes: Iterable[str], device: str = "/device:CPU:0") -> float:
    """Returns from where on what is computed in dtypes on a device is wrong."""
    limits = [_ROUNDING[_num_bytes(dtype)] for dtype in dtypes]
    kind = device.split(":")[-2]
    if kind == "TPU":
        limits.append(_ROUNDING[2])
    elif (
        kind == "GPU"
        and tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        limits.append(_ELEVEN_BITS)
    return max(limits, default=_ROUNDING[4])


def _num_bytes(dtype: tf.DType) -> int:
    return int(tf.as_dtype(dtype).real_dtype.size)


def distance(
    a: Any,
    b: Any,
    size: float = 0.0,
    noise: float = 0.0,
    num_bytes: int = 8,
) -> float:
    """Computes how far tensors are apart, as a share of the largest of `a`.

    Not a number equals itself; tensors of other shapes, and one beside None,
    are infinitely far apart. The share is one of `size` at least; what differs
    by no more than `noise`, or by the rounding of `num_bytes`, is 0 apart.
    """
    difference, size = _difference(a, b, size)
    if a is not None and not is_continuous(a):
        return difference
    if not difference or not math.isfinite(difference) or not size:
        return math.inf if difference else 0.0
    limit = _ROUNDING[min(a.dtype.real_dtype.size, num_bytes)]
    share = difference / size
    return share if share > limit and difference > noise else 0.0


def largest(tensor: tf.Tensor) -> float:
    """Returns the largest finite number; 0 where there is none, or None."""
    tensor = as_tensor(tensor)
    if tensor is None or 0 in tensor.shape:
        return 0.0
    wide = tf.cast(abs(tensor), tf.float64)
    return float(tf.reduce_max(tf.where(tf.math.is_finite(wide), wide, 0)))


def output_distance(values: Sequence[Any], expected: Sequence[Any]) -> float:
    """Computes how far tensors are apart, as a share of the largest of each."""
    pairs = zip(values, expected, strict=True)
    return max((_share(*_difference(e, v)) for v, e in pairs), default=0.0)


def gradient_distance(gradient: Any, expected: Any, tiny: float = 0.0) -> float:
    """Computes how far gradients are apart, as a share of the sum.

    None is taken for zeros; what is smaller than `tiny` is left out.
    """
    a, b = as_tensor(gradient), as_tensor(expected)
    if not is_continuous(a if b is None else b):
        return 0.0
    a = tf.zeros_like(b) if a is None else a
    b = tf.zeros_like(a) if b is None else b
    is_finite = tf.reduce_all(tf.math.is_finite(abs(a)))
    if is_finite and max(largest(a), largest(b)) < tiny:
        return 0.0
    return _share(*_difference(b, a, is_sum=True))


def change_distance(
    value: Any, expected: Any, before: Any, scale: float = 0.0
) -> float:
    """Computes how far a new value is from what it should be.

    As a share of the largest change that it should have seen. Where that is
    nothing but rounding, of that. `scale` is the largest of the numbers that it
    was computed from: it may be zero but for their rounding.
    """
    before = tf.convert_to_tensor(before)
    if not is_continuous(before):  # integers are not rounded
        is_same = tf.reduce_all(
            tf.equal(value, tf.cast(expected, before.dtype))
        )
        return 0.0 if is_same else math.inf
    num_bytes = _num_bytes(before.dtype)
    value, expected, before = (
        tf.cast(t, tf.float64) for t in (value, expected, before)
    )
    difference, size = _difference(expected, value, scale)
    if not difference:
        return 0.0
    rounding = _lost(num_bytes, size)
    # So that a difference of mere rounding comes to `limit` at most.
    change = max(largest(expected - before), rounding / _ROUNDING[num_bytes])
    return _share(difference, change)


def _lost(num_bytes: int, size: float) -> float:
    return _UNITS_IN_LAST_PLACE * _EPSILON[num_bytes] * size


def _share(difference: float, size: float) -> float:
    if not math.isfinite(difference) or (difference and not size):
        return math.inf
    return difference / size if size else 0.0


def _difference(
    a: Any, b: Any, size: float = 0.0, is_sum: bool = False
) -> tuple[float, float]:
    """Computes the largest difference, and the largest number of `a`.

    Or the sums of both. The number is `size` at least.
    """
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return (0.0 if a is b else math.inf), 1.0
    if 0 in a.shape or not is_continuous(a):
        return float(tf.reduce_any(a != b)), 1.0
    if tf.reduce_all(a == b):  # as nearly always: two operations, not twenty
        return 0.0, 1.0
    both_odd = (a == b) | ((a != a) & (b != b))
    wide = tf.complex128 if a.dtype.is_complex else tf.float64
    a, b = tf.cast(a, wide), tf.cast(b, wide)
    apart = tf.where(both_odd, tf.cast(0, tf.float64), abs(a - b))
    if is_sum:
        return float(tf.reduce_sum(apart)), float(tf.reduce_sum(abs(a)))
    return float(tf.reduce_max(apart)), max(largest(a), size)
