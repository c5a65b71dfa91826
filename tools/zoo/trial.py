"""Trains one model of the zoo, and compares: `python -m tools.zoo.trial NAME`.

Three steps of a mini-batch of four rows, in float64, with momentum; then
`evaluate` and `predict`. The last line that it prints is JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfgpipe
from tfgpipe.devices import local
from tools.zoo import applications, kerashub, own_calls
from tools.zoo.sample import ROWS, Sample

K = 4
EXACT = 1e-10
SAMPLES = {**applications.SAMPLES, **kerashub.SAMPLES, **own_calls.SAMPLES}
STEPS = 5  # that are timed


@dataclasses.dataclass
class Row:
    """What was found about a model.

    Attributes:
        name: The model's.
        problem: Why it could not be trained, or "".
        num_cells: K, at most as many as the model has calls.
        num_micro_batches: M.
        num_steps: How many calls of layers and operations it has.
        loss: The largest relative difference from Keras, of a loss in `fit` or
            `evaluate`.
        weights: Of a variable, relative to its largest value, at least 0.01.
        outputs: Of `predict`, the same.
        keras: Where `weights` is not exact, the same for Keras from initial
            weights that differ in their last bit; else None.
        is_bit_identical: Whether two and four cells give the same bits.
        balance: Cost of the largest cell by that of the mean.
        kilobytes: Of a row, that cross from each cell to the next, in float64.
        first_step: CPU seconds to the end of the first step by Keras's.
        step: CPU seconds of a later step in one cell by Keras's.
    """

    name: str
    problem: str = ""
    num_cells: int = K
    num_micro_batches: int = 0
    num_steps: int = 0
    loss: float = 0.0
    weights: float = 0.0
    outputs: float = 0.0
    keras: float | None = None
    is_bit_identical: bool = False
    balance: float = 0.0
    kilobytes: list[float] = dataclasses.field(default_factory=list)
    first_step: float = 0.0
    step: float = 0.0


@dataclasses.dataclass
class Trained:
    """A model that was trained, and what it said."""

    model: Any
    losses: list[float]
    outputs: list[Any]
    variables: list[Any]
    first_seconds: float
    fit: Callable[[], Any]

    def step_seconds(self) -> float:
        """CPU seconds of the fastest of some steps more."""
        seconds = []
        for _ in range(STEPS):
            start = time.process_time()
            self.fit()
            seconds.append(time.process_time() - start)
        return min(seconds)


def compare(name: str) -> Row:
    """Trains a model of the zoo by itself and in pipelines."""
    row, sample = Row(name), SAMPLES[name]
    row.num_micro_batches = sample.num_micro_batches
    try:
        doing = "plain Keras: "
        plain = _trained(sample, lambda model: model)
        doing = ""
        one = _trained(sample, lambda model: tfgpipe.GPipe(model, 1, 1))
        row.num_steps = len(_source(one.model).steps)
        row.num_cells = k = min(K, row.num_steps)
        two = _trained(sample, functools.partial(_pipeline, sample, min(2, k)))
        four = _trained(sample, functools.partial(_pipeline, sample, k))
        row.loss = _largest(four.losses, plain.losses, 0.0)
        row.weights = _largest(four.variables, plain.variables)
        row.outputs = _largest(four.outputs, plain.outputs)
        row.is_bit_identical = all(
            map(np.array_equal, two.variables, four.variables)
        )
        if row.weights > EXACT:
            other = _trained(sample, _nudged)
            row.keras = _largest(other.variables, plain.variables)
        row.first_step = four.first_seconds / plain.first_seconds
        row.step = one.step_seconds() / plain.step_seconds()
        _describe(row, four.model)
    except Exception as error:  # a row says so
        row.problem = _short(f"{doing}{type(error).__name__}: {error}")
    return row


def _short(message: str) -> str:
    """A message on one line, as a page can show it."""
    plain = re.sub(r"\x1b\[\d+m", "", message)
    return " ".join(plain.split())[:600]


def _pipeline(sample: Sample, k: int, model: keras.Model) -> Any:
    return tfgpipe.GPipe(model, k, sample.num_micro_batches)


def _nudged(model: keras.Model) -> keras.Model:
    """The model, with the next larger value for every trainable weight."""
    for variable in model.trainable_variables:
        variable.assign(np.nextafter(variable.numpy(), np.inf))
    return model


def _trained(sample: Sample, wrap: Callable[[keras.Model], Any]) -> Trained:
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    x, model = sample.inputs(), sample.make()
    if hasattr(model, "preprocessor"):
        model.preprocessor = None
    rng = np.random.default_rng(2)
    y = keras.tree.map_structure(
        lambda t: rng.standard_normal(t.shape), _called(model, x)
    )
    start = time.process_time()
    model = wrap(model)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        "mse",
        metrics=[],  # a task of KerasHub would choose some
        weighted_metrics=[],
        jit_compile=False,
    )
    fit = functools.partial(
        model.fit, x, y, batch_size=ROWS, shuffle=False, verbose=0
    )
    losses = fit().history["loss"]
    first_seconds = time.process_time() - start
    losses += fit(epochs=2).history["loss"]
    evaluated = model.evaluate(x, y, batch_size=ROWS, verbose=0)
    losses += keras.tree.flatten(evaluated)
    outputs = model.predict(x, batch_size=ROWS, verbose=0)
    variables = [v.numpy() for v in model.variables]
    flat = keras.tree.flatten(outputs)
    return Trained(model, losses, flat, variables, first_seconds, fit)


def _called(model: keras.Model, x: Any) -> Any:
    return model(keras.tree.map_structure(keras.ops.convert_to_tensor, x))


def _largest(found: Any, expected: Any, least: float = 0.01) -> float:
    """The largest difference of two arrays, by the largest value."""
    return max(
        float(
            np.max(np.abs(np.subtract(a, b, dtype="float64")), initial=0.0)
            / max(np.max(np.abs(b), initial=0.0), least)
        )
        for a, b in zip(found, expected, strict=True)
    )


def _describe(row: Row, model: tfgpipe.GPipe) -> None:
    """Notes how the model was cut."""
    cells = model.cells()
    costs = [cell.cost for cell in cells]
    row.balance = max(costs) / (sum(costs) / len(costs))
    live_bytes = _source(model).live_bytes
    ends = itertools.accumulate(len(cell.layers) for cell in cells[:-1])
    row.kilobytes = [round(live_bytes[end] / 1024, 1) for end in ends]


def _source(model: tfgpipe.GPipe) -> Any:
    return model.built_for("the zoo").source


def main(argv: list[str]) -> None:
    """Prints the row of a model as JSON."""
    local.hide_accelerators()
    local.split_cpu(K)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    print(json.dumps(dataclasses.asdict(compare(argv[1]))))


if __name__ == "__main__":
    main(sys.argv)
