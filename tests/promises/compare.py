"""Runs a case: trains plain Keras and pipelines, and compares them.

1. Plain Keras: history, weights, the optimizer's variables, `evaluate` and
   `predict`, to a relative 1e-9 in float64, 1e-4 in float32. Where
   micro-batches differ from their mini-batch by design (dropout, batch
   normalisation; see "Exactness" in the guide), only at one micro-batch; else
   inference before training.
2. One of these, since each takes a trace: another K and `remat` at the same M,
   bit by bit; or a file, or a file of weights, that is loaded at another K and
   trained on with, against the model that was not interrupted, bit by bit; or
   the same eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import case_models
import data_sources
import generate
import keras
import layer_kinds
import numpy as np
import tensorflow as tf
from case import Case, kinds_of
from differences import difference, floor_of
from keras import tree
from outcome import Difference, Outcome, of_error, summary

import tfgpipe
from tfgpipe import internals

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
NUDGE = {"float64": 1e-14, "float32": 1e-6}  # a few last bits
Numbers = dict[str, Any]


def run(case: Case) -> Outcome:
    """What becomes of a case."""
    with _settings(case.dtype):
        try:
            data = _data(case)
            expected = _reference(case, data)
        except Exception as error:
            detail = "".join(traceback.format_exception(error))
            return Outcome("skipped", f"Keras: {summary(error)}", detail)
        if not all(np.isfinite(a).all() for a in tree.flatten(expected)):
            return Outcome("skipped", "Keras: not finite")
        return _compare(case, data, expected)


def _compare(case: Case, data: Any, expected: Numbers) -> Outcome:
    comparison = _Comparison(case, data, expected)
    for check in comparison.checks():
        try:
            check()
        except Difference as error:
            if _is_unstable(case, data, expected, error.size):
                return Outcome("unstable", error.check)
            return Outcome("failed", str(error), str(error))
        except Exception as error:
            found = of_error(error, check.__name__.replace("_", " "))
            if found.kind == "failed" and not _compiles(case, data):
                return Outcome("skipped", "Keras: XLA compiles it neither")
            return found
    return Outcome("passed")


def _compiles(case: Case, data: Any) -> bool:
    """False where XLA is asked for, and cannot compile plain Keras."""
    if case.jit_compile:
        model = case_models.plain(case, False, jit_compile=True)
        try:
            _trained(case, model, data)
        except Exception:
            return False
    return True


# ------------------------------------------------------------------ plain Keras
def _data(case: Case) -> tuple[Any, Any, Any]:
    """`x`, `y` and `sample_weight` of all rows."""
    rng = np.random.default_rng(case.seed)
    x = data_sources.inputs(case, rng)
    tensors = tree.map_structure(tf.constant, x)
    outputs = case_models.plain(case)(tensors)
    shapes = tree.map_structure(lambda t: tuple(t.shape), outputs)
    y = data_sources.labels(case, rng, shapes)
    return x, y, data_sources.weights(case, rng, shapes)


def _reference(
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
    model = case_models.plain(case, eagerly)
    found: Numbers = {}
    if _infers_before(case):
        found["inference before training"] = _inference(case, model, data)
    found.update(_trained(known, model, data, callbacks=callbacks))
    if case.infers and _is_exact(case):
        found["inference"] = _inference(case, model, data)
    return found


class _Nudge(keras.callbacks.Callback):
    """Changes initial weights in their last bits.

    Args:
        seed: For the changes.
        size: Of the changes.
        x: Inputs, for which the model is built.
    """

    def __init__(self, seed: int, size: float, x: Any):
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.size, self.x = size, x

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.model.built:
            self.model(tree.map_structure(tf.constant, self.x))
        for w in self.model.trainable_variables:
            noise = self.size * self.rng.standard_normal(w.shape)
            w.assign(w.numpy() + noise * (1 + np.abs(w.numpy())))


def _is_unstable(case: Case, data: Any, expected: Numbers, size: float) -> bool:
    """Whether Keras differs from itself by a comparable amount.

    In a graph, or from weights that differ in their last bits: optimizers that
    divide by the size of a gradient make much of one that is zero but for
    rounding.
    """
    found = 0.0
    ways: list[Any] = [
        ((), False),
        *(((_Nudge(i, NUDGE[case.dtype], data[0]),), None) for i in range(3)),
    ]
    for way in ways:
        other = _reference(case, data, *way)
        for name, numbers in expected.items():
            floor = floor_of(name, case.dtype)
            found = max(found, difference(other[name], numbers, floor))
    return size <= {"float64": 1000, "float32": 10}[case.dtype] * found


# -------------------------------------------------------------------- numbers
def _is_exact(case: Case) -> bool:
    """Whether training promises Keras's numbers."""
    one = case.num_micro_batches * case.num_replicas == 1
    # XLA draws other random numbers.
    same = one and not case.jit_compile
    return same or not generate.is_random(case.layers)


def _infers_before(case: Case) -> bool:
    """Whether inference is compared where training is not."""
    is_fixed = generate.is_random_in_inference(case.layers)
    return case.infers and not _is_exact(case) and not is_fixed


def _trained(case: Case, model: Any, data: Any, **arguments: Any) -> Numbers:
    """Trains; everything that has changed."""
    history = model.fit(
        **data_sources.fit_arguments(case, *data),
        **{"epochs": case.epochs, **arguments},
    ).history
    return {
        "history": history,
        "weights": [w.numpy() for w in model.weights],
        "optimizer variables": [
            v.numpy()
            for v in model.optimizer.variables
            if model.trainable_variables  # else Keras may not have built it
        ],
    }


def _inference(case: Case, model: Any, data: Any) -> Any:
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


def _check_close(
    case: Case, check: str, found: Numbers, expected: Numbers
) -> None:
    for name, numbers in found.items():
        floor = floor_of(name, case.dtype)
        size = difference(numbers, expected[name], floor)
        if not size <= TOLERANCE[case.dtype]:
            raise Difference(check, name, size)


def _check_bits(
    case: Case, check: str, found: Numbers, expected: Numbers
) -> None:
    for name, numbers in found.items():
        size = difference(numbers, expected[name])
        if size > 0:
            raise Difference(check, name, size)


# --------------------------------------------------------------------- checks
class _Comparison:
    """The checks of a case; later ones use what earlier ones trained."""

    def __init__(self, case: Case, data: Any, expected: Numbers):
        self.case, self.data, self.expected = case, data, expected
        self.k = generate.partitions(case, case.num_partitions)
        self.other_k = generate.partitions(case, case.other_partitions)
        single = case.num_micro_batches * case.num_replicas == 1
        in_order = case.schedule == "gpipe" or single
        # XLA rounds a layer by what it is compiled with.
        is_same = in_order and not case.jit_compile
        check = _check_bits if is_same else _check_close
        self.check_same = functools.partial(check, case)

    def checks(self) -> Iterator[Callable[[], None]]:
        yield self.against_keras
        if self.case.then == "another K":
            yield self.another_k
        elif self.case.then in ("file", "weights"):
            yield self.load_and_go_on
        elif self.case.then == "eager":
            yield self.run_eagerly

    def _first(self, **arguments: Any) -> Any:
        case = self.case
        return case_models.pipeline(
            case, self.k, case.schedule, case.remat, **arguments
        )

    def _other(self, **arguments: Any) -> Any:
        return case_models.pipeline(
            self.case,
            self.other_k,
            "gpipe",
            self.case.other_remat,
            **arguments,
        )

    def against_keras(self) -> None:
        case, found = self.case, {}
        # A file of weights is for a model that is built.
        built = (
            True if case.then == "weights" and case.inputs != "dict" else None
        )
        self.model = self._first(explicit_input=built)
        exact = _is_exact(case)
        if _infers_before(case):
            found["inference before training"] = _inference(
                case, self.model, self.data
            )
        self.found = _trained(case, self.model, self.data)
        found.update(self.found if exact else {})
        if case.infers and exact:
            found["inference"] = _inference(case, self.model, self.data)
        _check_close(case, "against Keras", found, self.expected)

    def _as_first(self, model: Any) -> Numbers:
        """Trains after what the first model did before, too.

        Recurrent layers with dropout draw from their seeds in inference.
        """
        if _infers_before(self.case):
            _inference(self.case, model, self.data)
        return _trained(self.case, model, self.data)

    def another_k(self) -> None:
        found = self._as_first(self._other())
        self.check_same("over K", found, self.found)

    def load_and_go_on(self) -> None:
        case = self.case
        if internals.unlisted(self.model.optimizer):
            return  # Keras's files have no place for it
        with tempfile.TemporaryDirectory() as folder:
            if case.then == "file" and self._has_file():
                path = os.path.join(folder, "model.keras")
                self.model.save(path)
                with case_models.scope(case, self.other_k, "gpipe"):
                    other = tfgpipe.load_model(
                        path,
                        num_partitions=self.other_k,
                        schedule="gpipe",
                        remat=case.other_remat,
                    )
            elif case.inputs != "dict":
                path = os.path.join(folder, "model.weights.h5")
                self.model.save_weights(path)
                other = self._other(explicit_input=True)
                other.load_weights(path)
            else:
                return
        expected = _trained(case, self.model, self.data, epochs=1)
        found = _trained(case, other, self.data, epochs=1)
        self.check_same(f"after loading a {case.then}", found, expected)

    def _has_file(self) -> bool:
        return not kinds_of(self.case.layers) & layer_kinds.WITHOUT_FILE

    def run_eagerly(self) -> None:
        found = self._as_first(self._first(run_eagerly=True))
        if not isinstance(self.case.losses, str):
            del found["history"]  # see `case_models.plain`
        _check_close(self.case, "eagerly", found, self.found)


@contextlib.contextmanager
def _settings(dtype: str) -> Iterator[None]:
    """A precision, and errors with all their frames."""
    filtered = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        if filtered:
            keras.config.enable_traceback_filtering()
