"""What a case changes while it trains, and what a subclass does itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
from case import Case
from keras import ops, tree


# ------------------------------------------------------------------ subclasses
class OwnLoss:
    """Looks at nothing but the outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return sum(ops.mean(ops.square(b - 0.3)) for b in tree.flatten(y_pred))


class MoreLoss:
    """Adds to the loss that was compiled."""

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        found = super().compute_loss(x, y, y_pred, *args, **kwargs)
        outputs = tree.flatten(y_pred)
        return found + 0.1 * ops.mean(ops.square(outputs[0]))


class MoreLosses:
    """Adds the size of the first weight."""

    @property
    def losses(self):
        return [
            *super().losses,
            0.1 * ops.mean(ops.square(self.trainable_variables[0])),
        ]


class LossOfInputs:
    """Reads inputs as they come: bytes wrap, and a dict has names."""

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        found = super().compute_loss(x, y, y_pred, *args, **kwargs)
        output = tree.flatten(y_pred)[0]
        return found + ops.mean(_of_inputs(x, output) * output)


class MetricsOfInputs:
    """Has a metric of inputs as they come."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        output = tree.flatten(y_pred)[0]
        return {**found, "of inputs": ops.mean(_of_inputs(x, output))}


def _of_inputs(x, like):
    """A number for each row, in the shape of an output."""
    x = x["x0"] if isinstance(x, dict) else x + x
    sums = 0.01 * ops.sum(ops.cast(x, like.dtype), axis=-1)
    return ops.reshape(sums, (-1, *[1] * (len(like.shape) - 1)))


class AssignsResources:
    """Assigns what layers have read, when a mini-batch is done."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        for layer in self.layers:
            if hasattr(layer, "read_later"):
                layer.read_later.assign_add(1.0)
        return super().compute_metrics(x, y, y_pred, sample_weight)


# -------------------------------------------------------- models of a user's
class OwnWeights:
    """Makes weights itself: one that is trained, and a counter of steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x, training=None, mask=None):
        y = super().call(x, training=training, mask=mask)
        if training:
            self.steps.assign_add(1.0)
        return tree.map_structure(
            lambda t: t * ops.cast(self.scale, t.dtype), y
        )


class OwnPolicy:
    """Has a policy that none of its layers has: Keras scales the loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dtype_policy = "mixed_float16"


OVERRIDES = {
    "assigns resources": AssignsResources,
    "own weights": OwnWeights,
    "own policy": OwnPolicy,
    "loss of x": LossOfInputs,
    "metrics of x": MetricsOfInputs,
    "compute_loss": OwnLoss,
    "more loss": MoreLoss,
    "losses": MoreLosses,
    "losses of the model": MoreLosses,
}


# Those that the user's model has, and not the pipeline.
IN_MODEL = {"losses of the model", "own policy", "own weights"}


def overridden(override: str | None, base: type) -> type:
    """A model's class, or a subclass of it."""
    if override is None:
        return base
    return type("Overridden", (OVERRIDES[override], base), {})


# ------------------------------------------------------------------- callbacks
class Toggle(keras.callbacks.Callback):
    """Changes something when the second epoch begins."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch != 1:
            return
        if self.what == "learning_rate":
            self.model.optimizer.learning_rate = 0.01
        elif self.what == "weights":
            for weight in self.model.trainable_variables[:1]:
                weight.assign(0.5 * weight.numpy())
        else:
            for layer in self.model.layers[:1]:
                layer.trainable = not layer.trainable


def callbacks(case: Case) -> list[Any]:
    return [Toggle(case.toggle)] if case.toggle else []


# ------------------------------------------------ when a model is built
def is_changed(case: Case) -> bool:
    """Whether a model is changed before it is compiled."""
    kinds = {spec.kind for spec in case.layers}
    return case.unfreezes or bool(kinds & {"changed", "frozen_weight"})


def change(case: Case, layers: list[Any]) -> None:
    """Trains what was frozen, and has layers change what they are about."""
    for layer in layers:
        if case.unfreezes and layer.name in case.frozen:
            layer.trainable = True
        if hasattr(layer, "change"):
            layer.change()


# ------------------------------------------------ mini-batches that are skipped
def poisoned(case: Case, data: Any) -> Any:
    """The data with a row that is not a number."""
    if case.bad_row is None:
        return data

    def poison(x: Any) -> Any:
        x = x.copy()
        x[case.bad_row % len(x)] = np.nan
        return x

    return (tree.map_structure(poison, data[0]), *data[1:])


def without_bad(case: Case, data: Any) -> tuple[Case, Any]:
    """The case and the data without the mini-batch of that row."""
    if case.bad_row is None:
        return case, data
    start = case.bad_row % case.rows // case.batch_size * case.batch_size
    bad = np.arange(start, min(start + case.batch_size, case.rows))
    kept = tree.map_structure(
        lambda a: None if a is None else np.delete(a, bad, axis=0), data
    )
    return dataclasses.replace(case, rows=case.rows - len(bad)), kept
