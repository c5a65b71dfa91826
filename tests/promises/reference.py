"""The numbers of plain Keras, and how much they hang on rounding."""

from __future__ import annotations

from typing import Any

import case_models
import data_sources
import grouping
import keras
import mid_run
import numpy as np
import tensorflow as tf
from case import Case
from keras import tree

SURE = {"float64": 1000, "float32": 10, "bfloat16": 10}
NUDGE = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 1e-3}  # last bits
Numbers = dict[str, Any]


# ------------------------------------------------------------------ plain Keras
def make_data(case: Case) -> tuple[Any, Any, Any]:
    """`x`, `y` and `sample_weight` of all rows."""
    rng = np.random.default_rng(case.seed)
    x = data_sources.inputs(case, rng)
    tensors = tree.map_structure(tf.constant, x)
    outputs = case_models.plain(case)(tensors)
    shapes = tree.map_structure(lambda t: tuple(t.shape), outputs)
    y = data_sources.labels(case, rng, shapes)
    return x, y, data_sources.weights(case, rng, shapes)


def expected_numbers(
    case: Case,
    data: Any,
    callbacks: tuple[Any, ...] = (),
    eagerly: bool | None = None,
) -> Numbers:
    """The numbers of plain Keras.

    Data of unknown length comes with a known one: at the end of an epoch Keras
    may run half a step without data.
    """
    source = "dataset" if case.source == "unknown" else case.source
    known = Case(**{**vars(case), "source": source})
    known, data = mid_run.without_bad(known, data)
    model = case_models.plain(case, eagerly)
    found: Numbers = {}
    if infers_before(case):
        found["inference before training"] = inference(case, model, data)
    found.update(trained(known, model, data, callbacks=callbacks))
    if case.infers and is_exact(case):
        found["inference"] = inference(case, model, data)
    return found


class _Nudge(keras.callbacks.Callback):
    """Changes initial weights in their last bits."""

    def __init__(self, seed: int, size: float, x: Any):
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.size, self.x = size, x

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.model.built:
            self.model(tree.map_structure(tf.constant, self.x))
        for w in self.model.trainable_variables:
            noise = self.size * self.rng.standard_normal(w.shape)
            # What is zero stays so: Lamb asks whether it is.
            w.assign(w.numpy() + noise * np.abs(w.numpy()).max(initial=0))


def is_unstable(case: Case, data: Any, expected: Numbers, size: float) -> bool:
    """Whether Keras differs from itself by a comparable amount.

    In a graph, or from weights that differ in their last bits: optimizers that
    divide by the size of a gradient make much of one that is zero but for
    rounding.
    """
    found = 0.0
    ways: list[Any] = [
        ((), False),
        *(
            ((_Nudge(i, NUDGE[grouping.precision(case)], data[0]),), None)
            for i in range(3)
        ),
    ]
    for way in ways:
        other = expected_numbers(case, data, *way)
        for name, numbers in expected.items():
            floor = floor_of(name, grouping.precision(case))
            found = max(found, difference(other[name], numbers, floor))
    return size <= SURE[grouping.precision(case)] * found


# -------------------------------------------------------------------- numbers
def is_exact(case: Case) -> bool:
    """Whether training promises Keras's numbers."""
    one = case.num_micro_batches * case.num_replicas == 1
    # XLA draws other random numbers.
    same = one and not case.jit_compile
    return same or not grouping.is_random(case.layers)


def infers_before(case: Case) -> bool:
    """Whether inference is compared where training is not."""
    is_fixed = grouping.is_random_in_inference(case.layers)
    return case.infers and not is_exact(case) and not is_fixed


def trained(case: Case, model: Any, data: Any, **arguments: Any) -> Numbers:
    """Trains; everything that has changed."""
    more = mid_run.callbacks(case), arguments.pop("callbacks", ())
    history = model.fit(
        **data_sources.fit_arguments(case, *data),
        **{"epochs": case.epochs, **arguments},
        callbacks=[*more[0], *more[1]],
    ).history
    history.pop("skipped_steps", None)
    return {
        "history": history,
        "weights": [w.numpy() for w in model.weights],
        "optimizer variables": [
            v.numpy()
            for v in model.optimizer.variables
            if model.trainable_variables  # else Keras may not have built it
        ],
    }


def inference(case: Case, model: Any, data: Any) -> Any:
    x, y, sample_weight = data
    logs = model.evaluate(
        x,
        y,
        case.batch_size,
        sample_weight=sample_weight,
        verbose=0,
        return_dict=True,
    )
    return logs, model.predict(x, case.batch_size, verbose=0)


# ---------------------------------------------------------------- differences
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
