"""Runs a case: trains plain Keras and pipelines, and compares them.

1. Plain Keras: history, weights, the optimizer's variables, `evaluate` and
   `predict`, to a relative 1e-9 in float64, 1e-4 in float32. Where
   micro-batches differ from their mini-batch by design (dropout, batch
   normalisation; see "Exactness" in the guide), only at one micro-batch; else
   inference before training.
2. One of these, since each takes a trace: another K and `remat` at the same M,
   bit by bit; or a file, or a file of weights, that is loaded at another K and
   trained on with, against the model that was not interrupted, bit by bit; or
   eagerly, where the numbers are Keras's again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
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

import tfgpipe
from tfgpipe import internals

PACKAGE = pathlib.Path(tfgpipe.__file__).parent
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}
# "refused" by the library, with a clear error; "skipped" because Keras refuses
# it, or has no finite numbers; "unstable" if Keras differs from itself as much
# when weights change in their last bits.
KINDS = ("passed", "refused", "skipped", "unstable", "failed")
Numbers = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    kind: str  # one of `KINDS`
    reason: str = ""  # in short, for counting
    detail: str = ""


class Difference(AssertionError):
    """A promise that is broken, by a relative size."""

    def __init__(self, check: str, what: str, size: float):
        super().__init__(f"{check}: {what} differ by {size:.1e}")
        self.check, self.size = check, size


def run(case: Case) -> Outcome:
    with _settings(case.dtype) as said:
        try:
            data = reference.make_data(case)
            expected = reference.expected_numbers(case, data)
        except Exception as error:
            return Outcome("skipped", f"Keras: {summary(error)}", _all(error))
        if not _is_finite(expected):
            return Outcome("skipped", "Keras: not finite")
        for check in _Comparison(case, data, expected, said).checks():
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


def _is_finite(numbers: Numbers) -> bool:
    """Weights may be infinite where a layer keeps such state."""
    history = [*map(np.ravel, numbers["history"].values())]
    every = [np.asarray(a) for a in tree.flatten(numbers)]
    is_nan = any(np.isnan(a).any() for a in every)
    return bool(np.isfinite(np.concatenate(history)).all()) and not is_nan


def _compiles(case: Case, data: Any) -> bool:
    """False where XLA is asked for, and cannot compile plain Keras."""
    if case.jit_compile:
        model = case_models.plain(case, False, jit_compile=True)
        try:
            reference.trained(case, model, data)
        except Exception:
            return False
    return True


# --------------------------------------------------------------------- errors
def of_error(error: BaseException, check: str) -> Outcome:
    """A refusal, in the library's own words, or a failure."""
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    # TensorFlow moves the place to the message.
    places = re.findall(r'File "([^"]+)", line', text)
    places = places or [frame.filename for frame in frames]
    # A layer's error is handed on.
    is_handed_on = "must accept" in text and "this error" in text
    if (
        isinstance(error, (ValueError, NotImplementedError))
        and not is_handed_on
        and "Received" in text
        and pathlib.Path(*places[-1:]).is_relative_to(PACKAGE)
    ):
        return Outcome("refused", summary(error), text)
    return Outcome("failed", f"{check}: {summary(error)}", _all(error))


def _all(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def summary(error: BaseException) -> str:
    """An error in one line, without what differs from case to case."""
    text = str(error)
    if "in user code" in text:
        text = re.split(r"\n\s*\n", text.strip())[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = re.split(r" Received| Expected", lines[0] if lines else "")[0]
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", text)
    text = re.sub(r"\d+", "N", text)
    if not text.startswith(type(error).__name__):
        text = f"{type(error).__name__}: {text}"
    return text[:160]


# --------------------------------------------------------------------- checks
def _check(
    case: Case, is_close: bool, check: str, found: Any, expected: Any
) -> None:
    """Compares numbers, to rounding or to the bit."""
    dtype = grouping.precision(case)
    for name, numbers in found.items():
        floor = reference.floor_of(name, dtype)
        size = reference.difference(numbers, expected[name], floor)
        if not size <= (TOLERANCE[dtype] if is_close else 0):
            raise Difference(check, name, size)


class _Comparison:
    """The checks of a case; later ones use what earlier ones trained."""

    def __init__(self, case: Case, data: Any, expected: Numbers, said: Any):
        self.case, self.expected, self.said = case, expected, said
        self.data = mid_run.poisoned(case, data)
        self.k = case_models.partitions(case, case.num_partitions)
        self.other_k = case_models.partitions(case, case.other_partitions)
        self.is_single = case.num_micro_batches * case.num_replicas == 1
        in_order = case.schedule == "gpipe" or self.is_single
        # XLA rounds a layer by what it is compiled with.
        is_close = case.jit_compile or not in_order
        self.check_same = functools.partial(_check, case, is_close)

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
        elif self.case.then == "eager" and self.case.bad_row is None:
            yield self.run_eagerly

    def _first(self, **arguments: Any) -> Any:
        case = self.case
        return case_models.pipeline(
            case, self.k, case.schedule, case.remat, **arguments
        )

    def _other(self, **arguments: Any) -> Any:
        remat = self.case.other_remat
        return case_models.pipeline(
            self.case, self.other_k, "gpipe", remat, **arguments
        )

    def against_keras(self) -> None:
        case, found = self.case, {}
        # A file of weights is for a model that is built.
        is_built = case.then == "weights" and case.inputs != "dict"
        self.model = self._first(explicit_input=is_built or None)
        exact = reference.is_exact(case)
        if reference.infers_before(case):
            found["inference before training"] = self._inference(self.model)
        self.found = reference.trained(case, self.model, self.data)
        found.update(self.found if exact else {})
        if case.infers and exact:
            found["inference"] = self._inference(self.model)
        try:
            _check(case, True, "against Keras", found, self.expected)
        except Difference:
            if self.is_single or not self._is_told():
                raise

    def _is_told(self) -> bool:
        """Whether a layer that mixes rows is warned of, with a cure."""
        cures = "pass num_micro_batches=1", "train without replicas"
        return any(
            f"'{name}'" in text and any(cure in text for cure in cures)
            for name in grouping.mixing(self.case.layers)
            for text in (str(one.message) for one in self.said)
        )

    def draws_apart(self) -> None:
        """What cannot be drawn again is refused; else all draws differ."""
        case = self.case
        model = self._first()
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
            if case.then == "file" and self._has_file(kinds):
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
        if _is_finite(expected):
            found = reference.trained(case, other, self.data, epochs=1)
            check(f"after loading a {case.then}", found, expected)

    def _loaded(self, path: str) -> tuple[Any, Callable[..., None]]:
        """The model of a file, and how it is compared.

        It has another M or R where its numbers must not depend on them.
        """
        case, check = self.case, self.check_same
        arguments = {"schedule": "gpipe", "remat": case.other_remat}
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
            check = functools.partial(_check, case, True)
        k = case_models.partitions(case, self.other_k)
        with case_models.scope(case, k, "gpipe"):
            return tfgpipe.load_model(path, k, **arguments), check

    def _has_file(self, kinds: set[str]) -> bool:
        # Keras reads a graph otherwise if layers hold others of it, or a model
        # has tensors of it.
        holds = self.case.outputs and any(
            spec.kind == "model"
            or (spec.kind != "again" and "of" in spec.options)
            for spec in self.case.layers
        )
        has_own = self.case.override is not None or holds
        return not has_own and not kinds & WITHOUT_FILE

    def run_eagerly(self) -> None:
        found = self._as_first(self._first(run_eagerly=True))
        if not isinstance(self.case.losses, str):
            del found["history"]  # see `case_models.plain`
        _check(self.case, True, "eagerly", found, self.expected)
