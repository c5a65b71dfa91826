"""Which losses and metrics of a mini-batch follow from its micro-batches.

Those that treat every row by itself, so that sums over rows are enough. That is
known of what is listed here, and of losses that say `is_row_wise = True`. A
function of the user's, one that looks at all labels (`Hinge` takes 0 and 1 for
-1 and 1 if there are no others) or returns one number for a batch (`Dice`) is
not; it is given the outputs of the whole mini-batch.

Labels must have their rows on the axis on which the outputs have theirs, too.
Labels of shape (8,) for outputs of shape (8, 4) do not broadcast, but a
micro-batch of four rows would. Where that may happen, Keras decides, on the
whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.graphs import stateful_kinds

_LOSSES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.BinaryFocalCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.CategoricalFocalCrossentropy,
    keras.losses.CategoricalHinge,
    keras.losses.CosineSimilarity,
    keras.losses.Huber,
    keras.losses.KLDivergence,
    keras.losses.LogCosh,
    keras.losses.MeanAbsoluteError,
    keras.losses.MeanAbsolutePercentageError,
    keras.losses.MeanSquaredError,
    keras.losses.MeanSquaredLogarithmicError,
    keras.losses.Poisson,
    keras.losses.SparseCategoricalCrossentropy,
)

_LOSS_FUNCTIONS = {
    "binary_crossentropy",
    "categorical_crossentropy",
    "mean_absolute_error",
    "mean_squared_error",
    "sparse_categorical_crossentropy",
}

_REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")

# What a `MeanMetricWrapper` may average: those that fit ranks by squeezing or
# expanding the last axis, those that do not, and those of class numbers.
_SQUEEZING = {
    "accuracy",
    "binary_accuracy",
    "concordance_correlation",
    "cosine_similarity",
    "huber",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "pearson_correlation",
}

_OF_EQUAL_RANKS = {
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_accuracy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_hinge",
    "kl_divergence",
    "poisson",
    "top_k_categorical_accuracy",
}

_SPARSE = {
    "sparse_categorical_accuracy",
    "sparse_categorical_crossentropy",
    "sparse_top_k_categorical_accuracy",
}

# Metrics that add up what they count.
_F_SCORES = (keras.metrics.F1Score, keras.metrics.FBetaScore)

_INTERSECTIONS = (
    keras.metrics.BinaryIoU,
    keras.metrics.IoU,
    keras.metrics.MeanIoU,
    keras.metrics.OneHotIoU,
    keras.metrics.OneHotMeanIoU,
)

_COUNTERS = (
    keras.metrics.AUC,
    keras.metrics.FalseNegatives,
    keras.metrics.FalsePositives,
    keras.metrics.Precision,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.R2Score,
    keras.metrics.Recall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
    keras.metrics.TrueNegatives,
    keras.metrics.TruePositives,
)

# What a loss may do once for each micro-batch, if it says `is_row_wise`.
_TOLD = {"Print", "PrintV2"}

_MANY_ROWS = 7919  # a prime, which no other axis has


def loss_adds_up(
    model: keras.Model, y: Any, y_pred: Any, sample_weight: Any
) -> bool:
    """Whether a compiled model's loss, which is built, is a sum over rows.

    All others are nests of specs, `keras.KerasTensor`s.
    """
    compiled = internals.compiled_loss(model)
    if "compute_loss" in internals.overridden(model, keras.Model):
        return False
    if compiled is None:
        return True  # only `add_loss` and regularisers
    entries = internals.flat_losses(compiled)
    if len(entries) > 1 and not tree.is_nested(y_pred):
        return False  # of several losses for one tensor Keras may drop some
    if not _has_feature_axis(y_pred):
        return False
    data = y, y_pred, sample_weight
    return all(_look_at_losses(compiled, data, _is_rowwise_loss))


def _look_at_losses(
    compiled: Any,
    data: tuple[Any, Any, Any],
    look: Callable[[Any, Any, Any], bool],
) -> list[bool]:
    """What `look` returns of each loss, its labels and its outputs.

    Keras finds those of each loss in `data`: y, y_pred and sample_weight.
    """
    found: list[bool] = []

    def replace(_: int, loss: Any) -> Callable:
        def check(y: Any, y_pred: Any, sample_weight: Any) -> Any:
            found.append(look(loss, y, y_pred))
            return tf.zeros([])

        return check

    with (
        internals.outside_functions(),
        keras.StatelessScope(),  # for Keras's trackers
        internals.replaced_losses(compiled, replace),
    ):
        compiled(*data)
    return found


def has_own_scale(optimizer: Any) -> bool:
    """Whether an optimizer scales the loss in a way that Keras does not know.

    Keras's own multiply it by a number, which does not follow from the loss.
    """
    return optimizer is not None and not internals.is_keras(
        optimizer.scale_loss
    )


def metrics_add_up(
    model: keras.Model, y: Any, y_pred: Any, sample_weight: Any
) -> bool:
    """Whether a compiled model's metrics only add up rows.

    The arguments are those of `loss_adds_up`.
    """
    if "compute_metrics" in internals.overridden(model, keras.Model):
        return False
    compiled = internals.compiled_metrics(model)
    if compiled is None:
        return True
    return _has_feature_axis(y_pred) and all(
        _is_rowwise_metric(*call)
        for call in internals.metric_calls(compiled, y, y_pred, sample_weight)
    )


def _has_feature_axis(y_pred: Any) -> bool:
    """Losses average the last axis, which must not be the batch."""
    return all(len(t.shape) > 1 for t in tree.flatten(y_pred) if t is not None)


def _is_rowwise_loss(loss: Any, y: Any, y_pred: Any) -> bool:
    if _refusal(loss, y, y_pred) is not None:
        return False
    if getattr(loss, "is_row_wise", False):
        return True
    if tree.is_nested(y) or tree.is_nested(y_pred) or y is None:
        return False
    function = getattr(loss, "fn", None)  # compile(loss="mse") wraps it
    name = getattr(function, "__name__", "")
    known = internals.is_keras_function(function) and name in _LOSS_FUNCTIONS
    if _has_own_values(loss) or (not known and type(loss) not in _LOSSES):
        return False
    if name in _SPARSE:
        return _fits_sparse(y.shape, y_pred.shape)
    return _fits_squeezed(y.shape, y_pred.shape)


def refusals(
    model: keras.Model, y: Any, y_pred: Any, sample_weight: Any
) -> list[str]:
    """Says of losses that say `is_row_wise = True` why that cannot be.

    The arguments are those of `loss_adds_up`.
    """
    compiled = internals.compiled_loss(model)
    if compiled is None or "compute_loss" in internals.overridden(
        model, keras.Model
    ):
        return []
    found: list[str] = []

    def look(loss: Any, y: Any, y_pred: Any) -> bool:
        why = _refusal(loss, y, y_pred)
        if why is None and not _has_feature_axis(y_pred):
            why = "gets outputs without an axis besides the batch"
        if getattr(loss, "is_row_wise", False) and why is not None:
            found.append(f"{type(loss).__name__} {why}")
        return True

    _look_at_losses(compiled, (y, y_pred, sample_weight), look)
    return found


def _refusal(loss: Any, y: Any, y_pred: Any) -> str | None:
    """Says why a loss cannot be computed of some rows at a time, or None.

    It must accept labels and outputs of very many rows: if labels of one rank
    and outputs of another fit only for as many rows as another axis is long, it
    fails. And it must not assign or draw, which Keras does once a mini-batch.
    """
    if _has_own_call(loss):
        return "has a `__call__` of its own, which weighs and reduces"
    if loss.reduction not in _REDUCTIONS:
        return f"has reduction={loss.reduction!r}"
    if internals.function_arguments(loss).get("axis", -1) != -1:
        return "takes another axis than the last"
    if not getattr(loss, "is_row_wise", False):
        return None
    kinds: set[str] = set()
    assigned: list[Any] = []

    def call(y: Any, y_pred: Any) -> None:
        with keras.StatelessScope() as scope:
            loss.call(y, y_pred)
        assigned.extend(scope.state_mapping)
        graph = tf.compat.v1.get_default_graph()
        kinds.update(stateful_kinds(graph.get_operations()))

    def many(spec: Any) -> Any:  # in the dtype to which Keras casts both
        return tf.TensorSpec((_MANY_ROWS, *spec.shape[1:]), loss.dtype)

    try:
        tf.function(call, autograph=False).get_concrete_function(
            *tree.map_structure(many, (y, y_pred))
        )
    except Exception as error:  # Keras says what is wrong, on the mini-batch
        lines = str(error).strip().splitlines() or [""]
        return (
            f"fails for {_MANY_ROWS} rows ({type(error).__name__}: {lines[0]})"
        )
    kinds -= _TOLD
    if assigned:
        return "assigns variables, or draws from their seeds"
    if kinds:
        return f"runs {', '.join(sorted(kinds))}, once for each mini-batch"
    return None


def _is_rowwise_metric(
    metric: Any, y: Any, y_pred: Any, sample_weight: Any
) -> bool:
    if any(map(tree.is_nested, (y, y_pred, sample_weight))) or y is None:
        return False
    if "update_state" in vars(metric):  # instead of its class's
        return False
    kind, rank = type(metric), len(y_pred.shape)
    weights = None if sample_weight is None else len(sample_weight.shape)
    if kind in _F_SCORES:
        return len(y.shape) == rank and weights in (None, 1)
    if kind in _INTERSECTIONS:
        return _intersects_rows(metric, y.shape, y_pred.shape, weights)
    if kind in _COUNTERS:
        fits = _fits_squeezed(y.shape, y_pred.shape)
        return fits and weights in (None, 1, rank)
    return _averages_rows(metric, y, y_pred, weights)


def _averages_rows(
    metric: Any, y: Any, y_pred: Any, weights_rank: int | None
) -> bool:
    """Whether a metric is a mean of values that rows have by themselves."""
    arguments = internals.function_arguments(metric)
    function = internals.metric_function(metric)
    if type(metric) is keras.metrics.RootMeanSquaredError:
        name = "mean_squared_error"
    elif internals.is_keras(type(metric)) and internals.is_keras_function(
        function
    ):
        name = getattr(function, "__name__", "")
    else:
        return False
    if arguments.get("axis", -1) != -1:
        return False
    if weights_rank is not None:
        mask = internals.get_mask(y_pred)
        if mask is not None and len(mask.shape) != weights_rank:
            return False  # Keras multiplies the two
        ignored = arguments.get("ignore_class") is not None
        if ignored and len(y_pred.shape) - 1 != weights_rank:
            return False
    if name in _OF_EQUAL_RANKS:
        return len(y.shape) == len(y_pred.shape)
    if name in _SPARSE:
        return _fits_sparse(y.shape, y_pred.shape)
    return name in _SQUEEZING and _fits_squeezed(y.shape, y_pred.shape)


def _intersects_rows(
    metric: Any, y: Any, y_pred: Any, weights_rank: int | None
) -> bool:
    """Whether an `IoU` finds as many class numbers in labels as in outputs."""
    if metric.axis != -1:
        return False
    labels = y if metric.sparse_y_true else y[:-1]
    found = y_pred if metric.sparse_y_pred else y_pred[:-1]
    ones = len(found) == len(labels) + 1 and found[-1] == 1
    return (
        labels[1:] == found[1:] or (labels[1:] == found[1:-1] and ones)
    ) and weights_rank in (None, len(labels))


def _fits_squeezed(y: Any, y_pred: Any) -> bool:
    """Whether shapes have equal ranks once Keras has adapted the last axis."""
    if len(y) == len(y_pred) + 1:
        return y[-1] == 1
    if len(y_pred) == len(y) + 1:
        return y_pred[-1] == 1
    return len(y) == len(y_pred)


def _fits_sparse(y: Any, y_pred: Any) -> bool:
    """Whether labels are class numbers, one for each last axis of outputs."""
    return len(y) == len(y_pred) - 1 or (len(y) == len(y_pred) and y[-1] == 1)


def _has_own_values(loss: keras.losses.Loss) -> bool:
    """Whether a user says what a loss of Keras computes, as in a subclass."""
    owner = next(cls for cls in type(loss).__mro__ if "call" in vars(cls))
    if not internals.is_keras(owner) or "call" in vars(loss):
        return True
    function = getattr(loss, "fn", None)
    return function is not None and not internals.is_keras_function(function)


def _has_own_call(loss: keras.losses.Loss) -> bool:
    """Whether a loss replaces Keras's weighting and reduction by its own."""
    return type(loss).__call__ is not keras.losses.Loss.__call__
