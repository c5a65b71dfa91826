"""Losses, metrics and optimizers by name, and which of them go together."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import own_optimizers
from case import Case, Options
from keras import ops
from own_losses import (
    Counting,
    CountingInTensorFlow,
    Drawing,
    RowWise,
    register,
)

RATE = 0.05


@dataclasses.dataclass(frozen=True)
class Suits:
    """What a loss or metric is used with."""

    # "real", "positive", "binary" (0, 1), "signs" (-1, 1), "ternary" (-1, 0,
    # 1), "one_hot" or "ids".
    labels: tuple[str, ...]
    activation: str | None = None  # of the layer before it; None for any
    rank: int = 9  # most axes that outputs may have, the batch included

    def fits(self, rank: int) -> bool:
        return rank <= self.rank


# --------------------------------------------------------------------- losses
@register
def own_loss(y_true, y_pred):
    """Rows do not add up to it."""
    y_true = ops.cast(y_true, y_pred.dtype)
    return ops.log(1 + ops.mean(ops.square(y_true - y_pred)))


@register
def own_rows_loss(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred) ** 2, axis=-1)


@register
class OwnWhole(keras.losses.Loss):
    """Compares the spread of all labels with that of all outputs."""

    def call(self, y_true, y_pred):
        values = ops.mean(ops.abs(y_true - y_pred), axis=-1)
        return values * (1 + ops.std(y_true))


def suiting(suits: Suits, names: str) -> dict[str, Suits]:
    return dict.fromkeys(names.split(), suits)


REAL, POSITIVE = Suits(("real",)), Suits(("positive",), "softplus")
BINARY = Suits(("binary",), "sigmoid")
SIGNS = Suits(("binary", "signs", "ternary"))
ONE_HOT, IDS = Suits(("one_hot",), "softmax"), Suits(("ids",), "softmax")
LOSSES = {
    **suiting(
        BINARY,
        "BinaryCrossentropy BinaryFocalCrossentropy binary_crossentropy dice "
        "tversky",
    ),
    **suiting(
        ONE_HOT,
        "CategoricalCrossentropy CategoricalFocalCrossentropy "
        "categorical_crossentropy kl_divergence",
    ),
    **suiting(
        IDS,
        "CategoricalGeneralizedCrossEntropy SparseCategoricalCrossentropy "
        "sparse_categorical_crossentropy",
    ),
    **suiting(
        REAL,
        "CosineSimilarity Huber LogCosh MeanAbsoluteError MeanSquaredError "
        "cosine_similarity huber log_cosh mae mse own_loss own_rows_loss "
        "OwnRowWise OwnWhole",
    ),
    **suiting(POSITIVE, "MeanSquaredLogarithmicError Poisson poisson"),
    **suiting(SIGNS, "Hinge SquaredHinge hinge squared_hinge"),
    **suiting(Suits(("binary", "one_hot"), "sigmoid"), "Dice Tversky"),
    "CategoricalHinge": Suits(("one_hot",)),
    "Circle": Suits(("ids",), None, 2),
    "KLDivergence": Suits(("one_hot", "positive"), "softmax"),
    "MeanAbsolutePercentageError": Suits(("positive",)),
}
STATEFUL = {"CountingRows": REAL, "DrawingRows": REAL, "TFCountingRows": REAL}
SUITS = {**LOSSES, **STATEFUL}
OWN: dict[str, Any] = {
    "CountingRows": Counting,
    "DrawingRows": Drawing,
    "TFCountingRows": CountingInTensorFlow,
    "own_loss": own_loss,
    "own_rows_loss": own_rows_loss,
    "OwnRowWise": RowWise,
    "OwnWhole": OwnWhole,
}
# Their gradients begin when all outputs are there, so a schedule must wait.
WHOLE = {
    "CategoricalGeneralizedCrossEntropy",
    "Circle",
    "Dice",
    "Hinge",  # looks for a zero or a one among the labels
    "OwnWhole",
    "SquaredHinge",
    "Tversky",
    "own_loss",
    "own_rows_loss",
    *(
        name
        for name in LOSSES
        if name.islower()
        and name not in ("mse", "mae")
        and not name.endswith("crossentropy")
    ),
}


def loss(name: str, reduction: str | None) -> Any:
    """A loss, as it is given to `compile`."""
    if name.islower():
        return OWN.get(name, name)
    cls = OWN.get(name) or getattr(keras.losses, name)
    return cls() if reduction is None else cls(reduction=reduction)


# -------------------------------------------------------------------- metrics
@register
class OwnMetric(keras.metrics.Metric):
    """The largest absolute error so far, and a count of batches."""

    def __init__(self, name="own_metric", **kwargs):
        super().__init__(name=name, **kwargs)
        self.worst = self.add_weight(shape=(), initializer="zeros")
        self.calls = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred))
        self.worst.assign(ops.maximum(self.worst, error))
        self.calls.assign_add(1.0)

    def result(self):
        return self.worst + 0.001 * self.calls


METRICS = {
    **suiting(
        BINARY,
        "AUC BinaryAccuracy BinaryIoU Precision Recall function=dice "
        "function=tversky loss=Dice",
    ),
    **suiting(ONE_HOT, "KLDivergence OneHotIoU"),
    **suiting(
        REAL,
        "ConcordanceCorrelation CosineSimilarity MeanAbsoluteError "
        "MeanSquaredError PearsonCorrelation RootMeanSquaredError mse "
        "loss=MeanSquaredError own_loss OwnMetric",
    ),
    **suiting(SIGNS, "Hinge SquaredHinge hinge loss=Hinge"),
    "CategoricalAccuracy": Suits(("one_hot",)),
    "F1Score": Suits(("one_hot",), "softmax", 2),
    "Poisson": POSITIVE,
    "R2Score": Suits(("real",), None, 2),
    "SparseCategoricalAccuracy": Suits(("ids",)),
    "accuracy": Suits(("binary", "one_hot", "ids"), "sigmoid"),
    "mae": Suits(("real", "binary", "positive")),
}
OWN_METRICS: dict[str, Any] = {"own_loss": own_loss, "OwnMetric": OwnMetric}
METRIC_OPTIONS: dict[str, Options] = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
}


def metric(name: str) -> Any:
    """A metric, as it is given to `compile`."""
    what, _, of_losses = name.partition("=")
    if of_losses:
        found = getattr(keras.losses, of_losses)
        return found() if what == "loss" else found
    if name.islower():
        return OWN_METRICS.get(name, name)
    cls = OWN_METRICS.get(name) or getattr(keras.metrics, name)
    return cls(**METRIC_OPTIONS.get(name, {}))


# ----------------------------------------------------------------- optimizers
OPTIMIZERS = (
    "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Nadam RMSprop "
    "SGD"
).split()
OPTIMIZER_OPTIONS: tuple[Options, ...] = (
    {"clipnorm": 0.2},
    {"clipvalue": 0.05},
    {"global_clipnorm": 0.1},
    {"weight_decay": 0.1},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
    {"loss_scale_factor": 8.0},
)
SCHEDULES: dict[str, Options] = {
    "CosineDecay": {"initial_learning_rate": RATE, "decay_steps": 4},
    "ExponentialDecay": {
        "initial_learning_rate": RATE,
        "decay_steps": 2,
        "decay_rate": 0.5,
    },
    "PiecewiseConstantDecay": {
        "boundaries": [1, 3],
        "values": [0.1, 0.01, 0.0],
    },
}


def optimizer(found: Options) -> Any:
    """A new optimizer of what a case says."""
    options = {"learning_rate": RATE, **found.get("options", {})}
    scaled = options.pop("scaled", False)
    if decay := options.pop("decay", None):
        schedule = getattr(keras.optimizers.schedules, decay)
        options["learning_rate"] = schedule(**SCHEDULES[decay])
    name = found["name"]
    own = {**own_optimizers.OWN, **own_optimizers.SCALING}
    cls = own.get(name) or getattr(keras.optimizers, name)
    made = cls(**options)
    if scaled:
        return keras.optimizers.LossScaleOptimizer(
            made, initial_scale=64.0, dynamic_growth_steps=2
        )
    return made


def arguments(case: Case) -> Options:
    """The arguments of `compile`, new ones."""

    def of(name: str) -> Any:
        return loss(name, case.reduction)

    losses = case.losses
    if isinstance(losses, dict):
        losses = {key: of(name) for key, name in losses.items()}
    elif isinstance(losses, (list, tuple)):
        losses = [of(name) for name in losses]
    else:
        losses = of(losses)
    found: Options = {"optimizer": optimizer(case.optimizer), "loss": losses}
    if case.loss_weights is not None:
        found["loss_weights"] = case.loss_weights
    for name in ("metrics", "weighted_metrics"):
        if chosen := getattr(case, name):
            found[name] = _by_output(case, [metric(m) for m in chosen])
    return found


def _by_output(case: Case, metrics: list[Any]) -> Any:
    """Metrics of the first output, where there are two."""
    if isinstance(case.losses, dict):
        return {"a": metrics}
    if isinstance(case.losses, (list, tuple)):
        return [metrics, []]
    return metrics
