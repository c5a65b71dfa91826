"""The data of a case, and the ways in which it comes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from case import Case, Options
from keras import tree
from objectives import SUITS

VOCABULARY = 7
SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (4,),
    "sequence": (3, 4),
    "image": (8, 8, 4),  # smaller ones have kernels of their own
    "tokens": (4,),
    "bytes": (4,),
    "names": (4,),
}
SOURCES = (
    "arrays",
    "dataset",
    "remainder",  # dropped
    "unknown",  # length
    "generator",
    "uneven",
    "pydataset",
    "repeated",
)


def inputs(case: Case, rng: np.random.Generator) -> Any:
    """`x` of all rows."""
    if case.inputs == "dict":
        return {
            "a": rng.standard_normal((case.rows, 2)),
            "b": rng.standard_normal((case.rows, 2)),
        }
    if case.inputs == "pair":
        return [rng.standard_normal((case.rows, 4)) for _ in range(2)]
    if case.inputs == "names":
        return {f"x{i}": rng.standard_normal((case.rows, 4)) for i in range(2)}
    if case.inputs == "bytes":
        return rng.integers(0, 256, (case.rows, 4)).astype("uint8")
    shape = SHAPES[case.inputs]
    if case.length is not None:
        shape = (case.length, *shape[1:])
    if case.inputs == "tokens":
        ids = rng.integers(1, VOCABULARY, (case.rows, *shape))
        lengths = rng.integers(1, shape[0] + 1, (case.rows, 1))
        return np.where(np.arange(shape[0]) < lengths, ids, 0).astype("int32")
    return rng.standard_normal((case.rows, *shape))


def labels(case: Case, rng: np.random.Generator, outputs: Any) -> Any:
    """`y` for outputs of some shapes, (batch, ...) each."""

    def one(kind: str, shape: tuple[int, ...]) -> Any:
        shape = (case.rows, *shape[1:])
        if kind == "real":
            return rng.standard_normal(shape)
        if kind == "positive":
            return rng.random(shape) + 0.1
        if kind == "ternary":
            return rng.integers(-1, 2, shape).astype("float64")
        if kind in ("binary", "signs"):
            found = rng.integers(0, 2, shape).astype("float64")
            return found if kind == "binary" else 2 * found - 1
        ids = rng.integers(0, shape[-1], shape[:-1])
        return ids if kind == "ids" else np.eye(shape[-1])[ids]

    def default(name: str) -> str:
        return SUITS[name].labels[0]

    if isinstance(case.losses, dict):
        return {k: one(default(n), outputs[k]) for k, n in case.losses.items()}
    if isinstance(case.losses, (list, tuple)):
        return [one(default(n), s) for n, s in zip(case.losses, outputs)]
    return one(case.labels or default(case.losses), outputs)


def weights(case: Case, rng: np.random.Generator, outputs: Any) -> Any:
    """`sample_weight`, or None."""
    if case.weights not in ("rows", "positions"):
        return None
    if isinstance(outputs, (dict, list)):
        several = tree.map_structure_up_to(
            case.losses, lambda name: rng.random(case.rows), case.losses
        )
        return several
    if case.weights == "rows":
        return rng.random(case.rows)
    return rng.random((case.rows, *outputs[1:-1]))


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays: Any, sizes: list[int]):
        super().__init__()
        self.arrays, self.bounds = arrays, list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, index: int) -> Any:
        start = self.bounds[index - 1] if index else 0
        rows = slice(start, self.bounds[index])
        return tree.map_structure(lambda a: a[rows], self.arrays)


def _sizes(case: Case) -> list[int]:
    """Rows of each mini-batch."""
    if case.source == "uneven":
        sizes = [1, case.batch_size, 2]
        return [
            n for i, n in enumerate(sizes) if sum(sizes[: i + 1]) <= case.rows
        ]
    whole, rest = divmod(case.rows, case.batch_size)
    return [case.batch_size] * whole + [rest] * (rest > 0)


def fit_arguments(case: Case, x: Any, y: Any, sample_weight: Any) -> Options:
    """What `fit` gets as data; new iterators each time."""
    found: Options = {"shuffle": False, "verbose": 0}
    if case.weights == "classes":
        found["class_weight"] = {i: 0.5 + 0.4 * i for i in range(12)}
    if case.source == "arrays":
        return {
            **found,
            "x": x,
            "y": y,
            "sample_weight": sample_weight,
            "batch_size": case.batch_size,
        }
    arrays = (x, y) if sample_weight is None else (x, y, sample_weight)
    if case.source in ("generator", "uneven"):
        sizes = _sizes(case)
        found["steps_per_epoch"] = len(sizes)
        return {**found, "x": _forever(Batches(_as_tuples(arrays), sizes))}
    if case.source == "pydataset":
        return {**found, "x": Batches(_as_tuples(arrays), _sizes(case))}
    data = tf.data.Dataset.from_tensor_slices(_as_tuples(arrays))
    if case.source == "unknown":
        data = data.filter(lambda *_: True)
    data = data.batch(case.batch_size, case.source == "remainder")
    if case.source == "repeated":
        found["steps_per_epoch"] = len(_sizes(case))
        data = data.repeat()
    return {**found, "x": data}


def _as_tuples(arrays: Any) -> Any:
    """TensorFlow's datasets take a list for one tensor."""
    return tuple(tuple(a) if isinstance(a, list) else a for a in arrays)


def _forever(batches: Batches) -> Iterator[Any]:
    while True:
        for i in range(len(batches)):
            yield batches[i]
