"""How different numbers are, in nests."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import tree

# Numbers that are smaller are as good as zero. A bias that a normalisation
# takes away again gets the rounding of its gradient, divided by Adam's epsilon.
FLOOR = 1e-2
OPTIMIZER_FLOORS = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 1e-2}


def difference(found: Any, expected: Any, floor: float = FLOOR) -> float:
    """The largest one, relative to the largest value of each tensor.

    Infinities must be in the same places; what is no number differs from all.
    """
    if _names(found) != _names(expected):
        return np.inf
    worst = 0.0
    for a, b in zip(tree.flatten(found), tree.flatten(expected)):
        a, b = _floats(a), _floats(b)
        known = np.isfinite(a)
        if np.isnan(a).any():
            return np.inf
        if a.shape != b.shape or not np.array_equal(known, np.isfinite(b)):
            return np.inf
        a, b = a[known], b[known]
        if a.size:
            scale = max(np.abs(b).max(), floor)
            worst = max(worst, np.abs(a - b).max() / scale)
    return float(worst)


def _floats(numbers: Any) -> np.ndarray:
    """In float64, complex ones as two."""
    numbers = np.asarray(numbers)
    if np.iscomplexobj(numbers):
        numbers = np.stack([numbers.real, numbers.imag])
    return numbers.astype("float64")


def floor_of(name: str, dtype: str) -> float:
    """What is as good as zero, among numbers computed in a dtype."""
    is_state = name == "optimizer variables"
    return OPTIMIZER_FLOORS[dtype] if is_state else FLOOR


def _names(numbers: Any) -> Any:
    """What must be equal besides values."""
    keys = sorted(numbers) if isinstance(numbers, dict) else None
    return keys, len(tree.flatten(numbers))
