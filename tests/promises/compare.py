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
import dataclasses
import functools
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import case_models
import grouping
import keras
import mid_run
import numpy as np
import reference
from case import Case, kinds_of
from keras import tree
from layer_kinds import WITHOUT_FILE, WITHOUT_WEIGHTS
from outcome import Difference, Outcome, of_error, summary
from reference import difference, floor_of

import tfgpipe
from tfgpipe import internals

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}
Numbers = dict[str, Any]


def run(case: Case) -> Outcome:
    """What becomes of a case."""
    with _settings(case.dtype) as said:
        try:
            data = reference.make_data(case)
            expected = reference.expected_numbers(case, data)
        except Exception as error:
            detail = "".join(traceback.format_exception(error))
            return Outcome("skipped", f"Keras: {summary(error)}", detail)
        if not _is_finite(expected):
            return Outcome("skipped", "Keras: not finite")
        return _compare(case, data, expected, said)


def _is_finite(numbers: Numbers) -> bool:
    """Weights may be infinite where a layer keeps such state."""
    every = [np.asarray(a) for a in tree.flatten(numbers)]
    finite = np.isfinite(
        np.concatenate(list(map(np.ravel, numbers["history"].values())))
    )
    return finite.all() and not any(np.isnan(a).any() for a in every)


def _compare(
    case: Case, data: Any, expected: Numbers, said: list[Any]
) -> Outcome:
    comparison = _Comparison(case, data, expected, said)
    for check in comparison.checks():
        try:
            check()
        except Difference as error:
            if reference.is_unstable(case, data, expected, error.size):
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
            reference.trained(case, model, data)
        except Exception:
            return False
    return True


def _check_close(
    case: Case, check: str, found: Numbers, expected: Numbers
) -> None:
    for name, numbers in found.items():
        dtype = grouping.precision(case)
        size = difference(numbers, expected[name], floor_of(name, dtype))
        if not size <= TOLERANCE[dtype]:
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

    def __init__(
        self, case: Case, data: Any, expected: Numbers, said: list[Any]
    ):
        self.case, self.expected, self.said = case, expected, said
        self.data = mid_run.poisoned(case, data)
        self.k = case_models.partitions(case, case.num_partitions)
        self.other_k = case_models.partitions(case, case.other_partitions)
        single = case.num_micro_batches * case.num_replicas == 1
        in_order = case.schedule == "gpipe" or single
        # XLA rounds a layer by what it is compiled with.
        is_same = in_order and not case.jit_compile
        check = _check_bits if is_same else _check_close
        self.check_same = functools.partial(check, case)

    def checks(self) -> Iterator[Callable[[], None]]:
        if grouping.is_unseeded(self.case.layers):
            yield self.draws_apart
            return
        yield self.against_keras
        if self.case.then == "another K":
            yield self.another_k
        # A new trace sees at once what is trained now, in Keras, too: that of a
        # model that is loaded, and of an eager step.
        elif self.case.toggle == "trainable":
            return
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
        exact = reference.is_exact(case)
        if reference.infers_before(case):
            found["inference before training"] = self._inference(self.model)
        self.found = reference.trained(case, self.model, self.data)
        found.update(self.found if exact else {})
        if case.infers and exact:
            found["inference"] = self._inference(self.model)
        try:
            _check_close(case, "against Keras", found, self.expected)
        except Difference:
            if not self._is_told():
                raise

    def _is_told(self) -> bool:
        """Whether a layer that mixes rows is warned of, with a cure."""
        if self.case.num_micro_batches * self.case.num_replicas == 1:
            return False
        names = grouping.mixing(self.case.layers)
        texts = [str(one.message) for one in self.said]
        cures = "pass num_micro_batches=1", "train without replicas"
        return any(
            f"'{name}'" in text and any(cure in text for cure in cures)
            for name in names
            for text in texts
        )

    def draws_apart(self) -> None:
        """What cannot be drawn again is refused; else all draws differ."""
        case = self.case
        model = self._first(run_eagerly=case.then == "eager")
        reference.trained(case, model, self.data)
        if case.remat == "always":
            raise Difference("not refused", "draws", np.inf)
        drawn = [w.numpy() for w in model.weights if w.name == "drawn"]
        for i, one in enumerate(drawn):
            if any(np.array_equal(one, other) for other in drawn[:i]):
                raise Difference("between layers", "draws", np.inf)

    def _as_first(self, model: Any) -> Numbers:
        """Trains after what the first model did before, too.

        Recurrent layers with dropout draw from their seeds in inference.
        """
        if reference.infers_before(self.case):
            self._inference(model)
        return reference.trained(self.case, model, self.data)

    def _inference(self, model: Any) -> Any:
        """As the reference, which has no mini-batch that is skipped."""
        _, data = mid_run.without_bad(self.case, self.data)
        return reference.inference(self.case, model, data)

    def another_k(self) -> None:
        found = self._as_first(self._other())
        self.check_same("over K", found, self.found)

    def load_and_go_on(self) -> None:
        case, check = self.case, self.check_same
        kinds = kinds_of(case.layers)
        if internals.unlisted(self.model.optimizer) or kinds & WITHOUT_WEIGHTS:
            return  # Keras's files have no place for it
        with tempfile.TemporaryDirectory() as folder:
            if case.then == "file" and self._has_file():
                path = os.path.join(folder, "model.keras")
                self.model.save(path)
                other, check = self._loaded(path)
            elif case.inputs != "dict":
                path = os.path.join(folder, "model.weights.h5")
                self.model.save_weights(path)
                other = self._other(explicit_input=True)
                other.load_weights(path)
            else:
                return
        expected = reference.trained(case, self.model, self.data, epochs=1)
        if not _is_finite(expected):
            return
        found = reference.trained(case, other, self.data, epochs=1)
        check(f"after loading a {case.then}", found, expected)

    def _loaded(self, path: str) -> tuple[Any, Callable[..., None]]:
        """The model of a file, and how it is compared.

        It has another M or R where its numbers must not depend on them.
        """
        case, arguments, check = self.case, {}, self.check_same
        mixes = bool(grouping.mixing(case.layers))
        if not grouping.is_random(case.layers) and not mixes:
            case = dataclasses.replace(
                case,
                num_replicas=case.other_replicas or case.num_replicas,
                num_micro_batches=case.other_micro_batches
                or case.num_micro_batches,
            )
        if case != self.case:
            arguments["num_micro_batches"] = case.num_micro_batches
            check = functools.partial(_check_close, case)
        k = case_models.partitions(case, self.other_k)
        with case_models.scope(case, k, "gpipe"):
            model = tfgpipe.load_model(
                path,
                num_partitions=k,
                schedule="gpipe",
                remat=case.other_remat,
                **arguments,
            )
        return model, check

    def _has_file(self) -> bool:
        case = self.case
        # Keras reads a graph otherwise if layers hold others of it, or a model
        # has tensors of it.
        holds = case.outputs and any(
            spec.kind == "model"
            or (spec.kind != "again" and "of" in spec.options)
            for spec in case.layers
        )
        has_own = case.override is not None or holds
        return not has_own and not kinds_of(case.layers) & WITHOUT_FILE

    def run_eagerly(self) -> None:
        found = self._as_first(self._first(run_eagerly=True))
        if not isinstance(self.case.losses, str):
            del found["history"]  # see `case_models.plain`
        _check_close(self.case, "eagerly", found, self.found)


@contextlib.contextmanager
def _settings(dtype: str) -> Iterator[list[Any]]:
    """A precision, and errors with all their frames; yields warnings."""
    filtered = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        if filtered:
            keras.config.enable_traceback_filtering()
