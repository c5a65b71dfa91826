"""Which losses and metrics of a mini-batch follow from its micro-batches.

Those that treat every row by itself, so that sums over rows are enough: the
ones listed here, and losses that say `is_row_wise = True`. A user's function,
and one that looks at all labels (`Hinge` takes 0 and 1 for -1 and 1 if there
are no others) or returns one number for a batch (`Dice`), are given the outputs
of the whole mini-batch.

Labels must have their rows on the axis on which the outputs have theirs, too.
Labels of shape (8,) for outputs of shape (8, 4) do not broadcast, but a
micro-batch of four rows would. Where that may happen, Keras decides, on the
whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.graphs import stateful_kinds
from tfgpipe.internals import Nest

Shape = Sequence[int | None]


def _classes(module: Any, names: str) -> set[type]:
    return {getattr(module, name) for name in names.split()}


_LOSSES = _classes(
    keras.losses,
    "BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy "
    "CategoricalFocalCrossentropy CategoricalHinge CosineSimilarity Huber "
    "KLDivergence LogCosh MeanAbsoluteError MeanAbsolutePercentageError "
    "MeanSquaredError MeanSquaredLogarithmicError Poisson "
    "SparseCategoricalCrossentropy",
)

# Functions that `compile(loss="mse")` wraps.
_LOSS_FUNCTIONS = set(
    "binary_crossentropy categorical_crossentropy mean_absolute_error "
    "mean_squared_error sparse_categorical_crossentropy".split()
)

_REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")

# What a `MeanMetricWrapper` may average: functions that fit ranks by squeezing
# or expanding the last axis, functions that do not, and those of class numbers.
_SQUEEZING = set(
    "accuracy binary_accuracy concordance_correlation cosine_similarity huber "
    "log_cosh mean_absolute_error mean_absolute_percentage_error "
    "mean_squared_error mean_squared_logarithmic_error "
    "pearson_correlation".split()
)
_OF_EQUAL_RANKS = set(
    "binary_crossentropy binary_focal_crossentropy categorical_accuracy "
    "categorical_crossentropy categorical_focal_crossentropy "
    "categorical_hinge kl_divergence poisson top_k_categorical_accuracy".split()
)
_SPARSE = set(
    "sparse_categorical_accuracy sparse_categorical_crossentropy "
    "sparse_top_k_categorical_accuracy".split()
)

# Metrics that add up counts.
_F_SCORES = _classes(keras.metrics, "F1Score FBetaScore")
_INTERSECTIONS = _classes(
    keras.metrics, "BinaryIoU IoU MeanIoU OneHotIoU OneHotMeanIoU"
)
_COUNTERS = _classes(
    keras.metrics,
    "AUC FalseNegatives FalsePositives Precision PrecisionAtRecall R2Score "
    "Recall RecallAtPrecision SensitivityAtSpecificity "
    "SpecificityAtSensitivity TrueNegatives TruePositives",
)

# Operations that a loss may run once for each micro-batch, if it says
# `is_row_wise`.
_MESSAGES = {"Print", "PrintV2"}

_MANY_ROWS = 7919  # a prime, which no other axis has


def loss_obstacle(
    model: keras.Model, y: Nest, y_pred: Nest, sample_weight: Nest
) -> str | None:
    """Says why a compiled model's loss is no sum over rows; None if it is.

    It is built. All others are nests of specs, `keras.KerasTensor`s.
    """
    compiled = internals.compiled_loss(model)
    if "compute_loss" in internals.overridden(model, keras.Model):
        return "the model has a `compute_loss` of its own"
    if compiled is None:
        return None  # only `add_loss` and regularisers
    entries = internals.flat_losses(compiled)
    if len(entries) > 1 and not tree.is_nested(y_pred):
        return "several losses of one output"  # Keras may drop some
    if not _has_feature_axis(y_pred):
        return "outputs without an axis besides the batch"
    calls = _calls_of_losses(compiled, (y, y_pred, sample_weight))
    reasons = [
        f"{type(loss).__name__} {reason}"
        for loss, *data in calls
        if (reason := _obstacle(loss, *data)) is not None
    ]
    return " and ".join(reasons) or None


def _calls_of_losses(
    compiled: keras.losses.Loss, data: tuple[Any, Any, Any]
) -> list[tuple[keras.losses.Loss, Any, Any]]:
    """Returns each loss, with the labels and outputs that Keras finds for it.

    `data` are y, y_pred and sample_weight.
    """
    calls: list[tuple[keras.losses.Loss, Any, Any]] = []

    def replace(_: int, loss: keras.losses.Loss) -> Callable:
        def note(y: Nest, y_pred: Nest, sample_weight: Nest) -> tf.Tensor:
            calls.append((loss, y, y_pred))
            return tf.zeros([])

        return note

    with (
        internals.outside_functions(),
        keras.StatelessScope(),  # for Keras's trackers
        internals.replaced_losses(compiled, replace),
    ):
        compiled(*data)
    return calls


def has_own_scale(optimizer: keras.Optimizer | None) -> bool:
    """Returns whether an optimizer scales the loss as Keras's do not.

    Keras's multiply it by a number, which does not follow from the loss.
    """
    return optimizer is not None and not internals.is_keras(
        optimizer.scale_loss
    )


def metrics_add_up(
    model: keras.Model, y: Nest, y_pred: Nest, sample_weight: Nest
) -> bool:
    """Returns whether a compiled model's metrics only add up rows.

    The arguments are as in `loss_obstacle`.
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


def _has_feature_axis(y_pred: Nest) -> bool:
    """Returns whether the last axis, which losses average, is not the batch."""
    return all(len(t.shape) > 1 for t in tree.flatten(y_pred) if t is not None)


def _obstacle(loss: keras.losses.Loss, y: Nest, y_pred: Nest) -> str | None:
    """Says why a loss cannot be computed of some rows at a time, or None.

    One that says `is_row_wise` must accept labels and outputs of very many
    rows: if labels of one rank and outputs of another fit only for as many rows
    as another axis is long, it fails. And it must not assign or draw, which
    Keras does once a mini-batch.
    """
    if "__call__" in internals.overridden(loss, keras.losses.Loss):
        return "has a `__call__` of its own, which weighs and reduces"
    if loss.reduction not in _REDUCTIONS:
        return f"has reduction={loss.reduction!r}"
    if internals.function_arguments(loss).get("axis", -1) != -1:
        return "takes another axis than the last"
    if not getattr(loss, "is_row_wise", False):
        is_listed = _is_listed(loss, y, y_pred)
        return None if is_listed else "is no loss class of Keras over rows"
    kinds: set[str] = set()
    assigned: list[keras.Variable] = []

    def call(y: Nest, y_pred: Nest) -> None:
        with keras.StatelessScope() as scope:
            loss.call(y, y_pred)
        assigned.extend(scope.state_mapping)
        graph = tf.compat.v1.get_default_graph()
        kinds.update(stateful_kinds(graph.get_operations()))

    def of_many_rows(spec: keras.KerasTensor) -> tf.TensorSpec:
        # In the dtype to which Keras casts both.
        return tf.TensorSpec((_MANY_ROWS, *spec.shape[1:]), loss.dtype)

    try:
        tf.function(call, autograph=False).get_concrete_function(
            *tree.map_structure(of_many_rows, (y, y_pred))
        )
    except Exception as error:  # Keras says what is wrong, on the mini-batch
        lines = str(error).strip().splitlines() or [""]
        return (
            f"fails for {_MANY_ROWS} rows ({type(error).__name__}: {lines[0]})"
        )
    if assigned:
        return "assigns variables, or draws from their seeds"
    if kinds - _MESSAGES:
        names = ", ".join(sorted(kinds - _MESSAGES))
        return f"runs {names}, once for each mini-batch"
    return None


def _is_listed(loss: keras.losses.Loss, y: Nest, y_pred: Nest) -> bool:
    """Returns whether a loss is one above, and labels fit the outputs."""
    if tree.is_nested(y) or tree.is_nested(y_pred) or y is None:
        return False
    function = getattr(loss, "fn", None)
    is_of_keras = internals.is_keras_function(function)
    name = getattr(function, "__name__", "")
    is_known = type(loss) in _LOSSES or (
        is_of_keras and name in _LOSS_FUNCTIONS
    )
    is_changed = "call" in internals.overridden(loss)
    if is_changed or not is_known or (function and not is_of_keras):
        return False
    if name in _SPARSE:
        return _fits_sparse(y.shape, y_pred.shape)
    return _fits_squeezed(y.shape, y_pred.shape)


def _is_rowwise_metric(
    metric: keras.Metric, y: Nest, y_pred: Nest, sample_weight: Nest
) -> bool:
    if any(map(tree.is_nested, (y, y_pred, sample_weight))) or y is None:
        return False
    if "update_state" in vars(metric):  # instead of its class's
        return False
    kind, labels, outputs = type(metric), y.shape, y_pred.shape
    weights = None if sample_weight is None else len(sample_weight.shape)
    if kind in _F_SCORES:
        return len(labels) == len(outputs) and weights in (None, 1)
    if kind in _COUNTERS:
        fits = _fits_squeezed(labels, outputs)
        return fits and weights in (None, 1, len(outputs))
    if kind not in _INTERSECTIONS:
        return _averages_rows(metric, y, y_pred, weights)
    # A label for each output: as class numbers, or in an axis of classes.
    labels = labels if metric.sparse_y_true else labels[:-1]
    outputs = outputs if metric.sparse_y_pred else outputs[:-1]
    if len(outputs) == len(labels) + 1 and outputs[-1] == 1:
        outputs = outputs[:-1]
    return (
        metric.axis == -1
        and labels[1:] == outputs[1:]
        and weights in (None, len(labels))
    )


def _averages_rows(
    metric: keras.Metric, y: Nest, y_pred: Nest, weights_rank: int | None
) -> bool:
    """Returns whether a metric averages values, each of one row."""
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
        is_of_values = len(y_pred.shape) - 1 == weights_rank
        if arguments.get("ignore_class") is not None and not is_of_values:
            return False
    if name in _OF_EQUAL_RANKS:
        return len(y.shape) == len(y_pred.shape)
    if name in _SPARSE:
        return _fits_sparse(y.shape, y_pred.shape)
    return name in _SQUEEZING and _fits_squeezed(y.shape, y_pred.shape)


def _fits_squeezed(y: Shape, y_pred: Shape) -> bool:
    """Returns whether ranks are equal once Keras has adapted the last axis."""
    small, large = sorted((y, y_pred), key=len)
    missing = len(large) - len(small)
    return not missing or (missing == 1 and large[-1] == 1)


def _fits_sparse(y: Shape, y_pred: Shape) -> bool:
    """Returns whether labels are class numbers, one for each row of outputs."""
    return len(y) == len(y_pred) - 1 or (len(y) == len(y_pred) and y[-1] == 1)
