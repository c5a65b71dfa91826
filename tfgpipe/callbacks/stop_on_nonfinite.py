"""Ends a training whose mini-batches are not finite; finds where it began."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe.checks import checked_counts, checked_sink
from tfgpipe.graphs import is_continuous
from tfgpipe.internals import Nest
from tfgpipe.model import GPipe, all_finite


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends `fit` when too many mini-batches in a row were not finite.

    They were skipped, so the weights are those from before the first of them.
    The last one is run again, layer by layer, to name the first one whose
    outputs or gradients are not finite. For that, `fit` keeps the last
    mini-batch; another callback may have run it otherwise, and then no layer is
    named.

    Args:
        steps: How many in a row. Positive.
        say: Called with the reason. Defaults to printing it; None for silence.

    Attributes:
        reason: Why `fit` ended, in sentences; None if it was not for this.

    Raises:
        ValueError: If `steps` is not positive; from `fit` if the model is no
            `GPipe` with `skip_nonfinite=True`.

    Example:

    >>> import numpy as np
    >>> layers = [keras.layers.Dense(4, name=f"dense_{i}") for i in range(2)]
    >>> model = GPipe(layers, num_partitions=1, skip_nonfinite=True)
    >>> model.compile("sgd", "mse")
    >>> x = np.full((16, 4), np.nan)
    >>> stop = StopOnNonFinite(steps=2, say=None)
    >>> history = model.fit(x, x, 4, verbose=0, callbacks=[stop])
    >>> print(stop.reason)
    Stopped: the last 2 mini-batches were not finite, and were skipped. The
    inputs of the mini-batch are not finite.
    """

    def __init__(
        self,
        steps: int = 10,
        *,
        say: Callable[[str], object] | None = print,
    ) -> None:
        super().__init__()
        (self._steps,) = checked_counts(steps=steps)
        self._say = checked_sink("say", say)
        self._before = 0
        self._keeper: _Keeper | None = None
        self.reason: str | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Lets `fit` keep its last mini-batch."""
        model = self.model
        if not model.skip_nonfinite:
            raise ValueError(
                "`StopOnNonFinite` must watch a `GPipe` with "
                "`skip_nonfinite=True`. Received: skip_nonfinite=False."
            )
        self.reason = None
        self._before = model.skipped_in_a_row
        if not isinstance(model.train_function, _Keeper):
            model.train_function = _Keeper(model)
        self._keeper = model.train_function

    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        """Has the mini-batch kept, and the last one forgotten."""
        if self._keeper is not None:
            self._keeper.keep_next()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Ends `fit` if there were too many."""
        in_a_row = self.model.skipped_in_a_row
        if in_a_row < self._before:
            self._before = 0
        if in_a_row - self._before < self._steps:
            return
        self.model.stop_training = True
        data = None if self._keeper is None else self._keeper.data
        where = (
            "Which layer is the first could not be told: another callback ran "
            "the last one."
            if data is None
            else first_nonfinite(self.model, data)
        )
        are = "was" if in_a_row == 1 else "were"
        which = "mini-batch" if in_a_row == 1 else f"{in_a_row} mini-batches"
        self.reason = (
            f"Stopped: the last {which} {are} not finite, and {are} skipped. "
            f"{where}"
        )

    def on_train_end(self, logs: dict | None = None) -> None:
        """Says the reason, if there is one, and lets the mini-batch go."""
        if self.reason is not None:
            self._say(self.reason)
        if self._keeper is not None:
            self._keeper.withdraw()


class _Keeper:
    """Takes the place of a model's train function, and keeps its data.

    Attributes:
        data: The last mini-batch, or None.
    """

    def __init__(self, model: GPipe) -> None:
        self.data: Nest = None
        self._keeps = False
        self._model = model
        self._replaced = model.train_function
        train_step = model.train_step
        self._function = model.train_function_of(
            lambda data: (train_step(data), data)
        )

    def __call__(self, iterator: Any) -> Any:
        """Runs what the train function runs; returns its logs."""
        logs, data = self._function(iterator)
        # An error may have ended the `fit` with the callback.
        self.data = data if self._keeps else None
        self._keeps = False
        return logs

    def keep_next(self) -> None:
        """Keeps what the next call gets, instead of the last."""
        self.data, self._keeps = None, True

    def withdraw(self) -> None:
        """Gives the model its function back."""
        self.data = None
        if self._model.train_function is self:
            self._model.train_function = self._replaced


def first_nonfinite(model: GPipe, data: Nest) -> str:
    """Says where values of a mini-batch are not finite first.

    The mini-batch is run again, layer by layer; the model stays as it is. What
    comes first is told by its order in a training step: inputs, outputs of
    layers from the first to the last, the loss, and gradients from the last
    layer to the first.

    Args:
        model: A compiled `GPipe` that has seen data.
        data: A mini-batch: x, or a tuple of x, y and sample_weight.
    """
    told = _in_order(model, data)
    return next(sentence for is_finite, sentence in told if not is_finite)


def _in_order(model: GPipe, data: Nest) -> Iterator[tuple[bool, str]]:
    """Yields what is finite or not, and what to say if it is the first not."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    yield _are_finite(x), "The inputs of the mini-batch are not finite."
    total, gradients, start, sections = model.rehearse(data, _all)
    for section in sections:
        yield (
            all(section.gives),
            f"The outputs of {section.name} are not finite, and its inputs "
            "are.",
        )
    yield (
        _are_finite(total),
        "The loss is not finite, and the outputs of all layers are: look "
        "at the labels, or at what the loss does with such outputs.",
    )
    yield (
        all(start),
        "The gradient of the loss with respect to the outputs of the last "
        "layer is not finite, and the loss is.",
    )
    by_weight = dict(zip(map(id, model.trainable_weights), gradients))
    for section in reversed(sections):
        yield (
            all(section.gradients),
            f"The gradient with respect to the inputs of {section.name} is "
            "not finite, and that with respect to its outputs is.",
        )
        for weight in section.weights:
            yield (
                _are_finite(by_weight[id(weight)]),
                f"The gradient of the weight '{weight.path}' of "
                f"{section.name} is not finite, and later layers have "
                "finite ones.",
            )
    yield (
        False,
        "Run again, layer by layer, all its values are finite: what is not is "
        "the sum of squares of a gradient, which optimizers keep, or state "
        "that it would leave, such as a moving variance, or comes from "
        "rounding, or from XLA.",
    )


def _all(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
    """Returns whether all are finite, a scalar; where they are."""
    numbers = [*filter(is_continuous, tensors)]
    return all_finite(numbers) if numbers else tf.constant(True)


def _are_finite(nest: Nest) -> bool:
    """Returns whether all numbers of a nest of tensors are."""
    return all(
        bool(np.isfinite(tf.cast(tf.abs(t), "float64").numpy()).all())
        for t in tree.flatten(nest)
        if is_continuous(getattr(t, "values", t))
    )
