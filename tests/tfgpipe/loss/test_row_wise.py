import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from own_losses import CountingInTensorFlow, Drawing, RowWise, compiled
from tiny import quickly

import tfgpipe
from tfgpipe import internals
from tfgpipe.loss.row_wise import loss_obstacle, metrics_add_up

pytestmark = pytest.mark.usefixtures("float64")
losses, metrics = keras.losses, keras.metrics


def spec(*shape):
    return keras.KerasTensor((None, *shape))


class Subclassed(tfgpipe.GPipe):
    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return keras.ops.mean(keras.ops.abs(y - y_pred))


class OwnValues(losses.MeanSquaredError):
    """Its values depend on all rows."""

    def call(self, y, y_pred):
        return keras.ops.mean((y_pred - y) ** 2) + keras.ops.max(y_pred) ** 2


class OwnName(losses.MeanSquaredError):
    pass


@functools.wraps(losses.mean_squared_error)
def wrapped(y, y_pred):
    apart = y_pred - keras.ops.mean(y_pred, axis=0)
    return losses.mean_squared_error(y, apart)


def set_on_the_object():
    loss = losses.MeanSquaredError()
    loss.call = OwnValues().call
    return loss


@pytest.mark.parametrize(
    ("loss", "streams"),
    [
        (None, False),
        ("mse", True),
        (OwnName(), True),
        (OwnValues(), False),
        (wrapped, False),
        (set_on_the_object(), False),
        ("mean_squared_error", True),
        (keras.losses.mean_squared_error, True),
        (losses.Huber(), True),
        (RowWise(), True),
        (RowWise(reduction="sum"), True),
        (losses.CosineSimilarity(axis=0), False),
        (losses.Dice(), False),
        (losses.Tversky(), False),
        (losses.Hinge(), False),
        (lambda y, y_pred: keras.ops.mean(y_pred - y) ** 2, False),
        (lambda y, y_pred: keras.ops.mean((y_pred - y) ** 2, -1), False),
    ],
)
def test_only_losses_of_keras_that_add_rows_stream(loss, streams):
    if loss is None:
        model = compiled(Subclassed, loss="mse")
    else:
        model = compiled(loss=loss, run_eagerly=True)
    obstacle = loss_obstacle(model, spec(2), spec(2), None)
    assert (obstacle is None) == streams


@pytest.mark.parametrize("loss", [OwnValues(), wrapped])
@pytest.mark.parametrize("m", [1, 3])
def test_loss_made_of_one_of_keras_is_that_of_keras(loss, m):
    x = np.random.default_rng(0).standard_normal((7, 3))

    def train(make):
        keras.utils.set_random_seed(0)
        model = make([keras.Input((3,)), kl.Dense(3), kl.Dense(2)])
        metrics = [wrapped]
        model.compile("sgd", loss, **quickly(model, {"metrics": metrics}))
        return model.fit(x, x[:, :2], 4, shuffle=False, verbose=0).history

    found = train(lambda layers: tfgpipe.GPipe(layers, 2, m))
    for name, values in train(keras.Sequential).items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12)


class Texts(losses.Loss):
    """A loss of texts, which TensorFlow begins with an empty tensor."""

    is_row_wise = True

    def call(self, y_true, y_pred):
        tf.print("called", output_stream="file:///dev/null")
        ones = keras.ops.ones(keras.ops.shape(y_true)[:1], "int32")
        lengths = [ones * t.shape[1] for t in (y_true, y_pred)]
        return keras.ops.ctc_loss(
            keras.ops.cast(y_true, "int32"), y_pred, *lengths, mask_index=0
        )


@pytest.mark.filterwarnings("ignore:.*has side effects")
def test_loss_that_says_that_it_is_row_wise_is_believed():
    x = np.random.default_rng(0).standard_normal((6, 5, 3))
    y = np.random.default_rng(0).integers(1, 4, (6, 2))

    def trained(make):
        keras.utils.set_random_seed(0)
        model = make([kl.Dense(6, "tanh"), kl.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), Texts())
        history = model.fit(x, y, 4, epochs=2, shuffle=False, verbose=0)
        return [*history.history["loss"], *model.get_weights()]

    found = trained(lambda layers: tfgpipe.GPipe(layers, 2, 2, schedule="1f1b"))
    for a, b in zip(found, trained(keras.Sequential), strict=True):
        np.testing.assert_allclose(a, b, 1e-6)  # TensorFlow's, in float32


class OwnCall(RowWise):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(self.call(y_true, y_pred)) ** 2


class Unfitting(RowWise):
    def call(self, y_true, y_pred):
        if y_pred.shape[0] not in (None, 2, 4):
            raise ValueError("Too many.")
        return super().call(y_true, y_pred)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (Drawing(), "Drawing assigns variables, or draws"),
        (CountingInTensorFlow(), r"runs .*AssignVariableOp"),
        (OwnCall(), "OwnCall has a `__call__` of its own"),
        (Unfitting(), r"fails for 7919 rows \(ValueError: Too many"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_word_of_a_loss_that_cannot_be_is_answered(loss, why, parts):
    told = {"schedule": "1f1b"} if parts == 1 else {"head_parts": parts}
    model = tfgpipe.GPipe([kl.Dense(2), kl.Dense(2)], 2, 2, **told)
    model.compile("sgd", loss)
    with pytest.raises(ValueError, match=f"does not add up.*{why}"):
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 2)))


@pytest.mark.parametrize(
    ("metric", "streams"),
    [
        ("mae", True),
        ("accuracy", True),
        (keras.metrics.RootMeanSquaredError(), True),
        (keras.metrics.AUC(), True),
        (keras.metrics.Hinge(), False),
        (losses.MeanSquaredError(), False),
        (losses.dice, False),
        (lambda y, y_pred: keras.ops.max(y_pred), False),
    ],
)
def test_only_metrics_of_keras_stream(metric, streams):
    model = compiled(loss="mse", metrics=[metric], run_eagerly=True)
    assert metrics_add_up(model, spec(2), spec(2), None) == streams


# --------------------------------------------------- all that Keras has to give
ARGUMENTS = {
    "CategoricalGeneralizedCrossEntropy": {"q": 0.5},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5, "num_thresholds": 9},
    "RecallAtPrecision": {"precision": 0.5, "num_thresholds": 9},
    "SensitivityAtSpecificity": {"specificity": 0.5, "num_thresholds": 9},
    "SpecificityAtSensitivity": {"sensitivity": 0.5, "num_thresholds": 9},
    "categorical_generalized_cross_entropy": {"q": 0.5},
}
NO_LOSS = {"Loss", "deserialize", "get", "serialize"}
# Other outputs, other calls, or of other metrics.
NO_METRIC = {"Mean", "MeanMetricWrapper", "Metric", "Sum", *NO_LOSS}
SEQUENCES = {"CTC", "ctc"}
ROWS, UNITS = 8, 3  # micro-batches of 2, 3 and 3 rows


def of(module, left_out):
    """The losses or metrics of a module: pairs of its name and an object."""
    found = []
    for name in dir(module):
        if name.startswith("_") or name in left_out | SEQUENCES:
            continue
        thing, arguments = getattr(module, name), ARGUMENTS.get(name, {})
        if inspect.isclass(thing):
            thing = thing(**arguments)
        elif arguments:
            continue  # a function that takes more than labels and outputs
        found.append((name, thing))
    return found


def kind_of(name):
    if name.lower().startswith(("sparse", "circle", "categoricalgen")):
        return "sparse"
    counts = ("Precision", "Recall", "AUC", "Se", "Sp", "True", "False")
    return "one_hot" if name.startswith(counts) else "mixed"


def labels(kind):
    """Those of micro-batches differ: only 0 and 1, or others."""
    classes = np.random.default_rng(0).integers(0, UNITS, ROWS)
    one_hot = np.eye(UNITS)[classes]
    return {
        "sparse": classes.astype("float64"),
        "one_hot": one_hot,
        "mixed": np.where(np.arange(ROWS)[:, None] < 4, one_hot, 0.7),
    }[kind]


class Copies(kl.Layer):
    """As many equal outputs as there are losses."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def call(self, x):
        return dict.fromkeys(self.names, x + 0.0)


def trained(make, y, weigh=False, **compiled):
    """Logs and weights after an epoch; nests are dicts by output."""
    keras.utils.set_random_seed(1)
    model = make([kl.Dense(UNITS), kl.Softmax(), Copies(list(y))])
    model.compile("sgd", **quickly(model, compiled))
    weights = np.random.default_rng(2).random(ROWS)
    x = np.random.default_rng(1).standard_normal((ROWS, 4))
    logs = model.fit(
        *(x, y, ROWS),
        sample_weight=dict.fromkeys(y, weights) if weigh else None,
        shuffle=False,
        verbose=0,
    )
    return logs.history, model.get_weights()


def check_that_of_keras(*arguments, rtol=1e-9, **compiled):
    (logs, weights), (found, own) = (
        trained(make, *arguments, **compiled)
        for make in (keras.Sequential, lambda x: tfgpipe.GPipe(x, 2, 3))
    )
    assert set(found) == set(logs)
    for key, value in logs.items():
        np.testing.assert_allclose(found[key], value, rtol, err_msg=key)
    for a, b in zip(own, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol)


def one_by_one(entries, streams, **compiled):
    """Whether each streams, if it is the only loss or metric."""
    found = []
    for name, thing in entries:
        model = keras.Model()
        model.compile(**{key: [thing] for key in compiled})
        y = spec(*labels(kind_of(name)).shape[1:])
        internals.build_losses_and_metrics(model, None, y, spec(UNITS), None)
        found.append(streams(model, y, spec(UNITS), None))
    return found


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_every_loss_of_keras_is_that_of_keras(streams):
    entries = of(losses, NO_LOSS)
    known = one_by_one(
        entries, lambda *data: loss_obstacle(*data) is None, loss=None
    )
    entries = [e for e, known in zip(entries, known) if known == streams]
    assert len(entries) > 10
    names = {f"{i}_{name}": name for i, (name, _) in enumerate(entries)}
    check_that_of_keras(
        {key: labels(kind_of(name)) for key, name in names.items()},
        loss=dict(zip(names, [thing for _, thing in entries])),
    )


@pytest.mark.parametrize(
    ("kind", "streams"),
    [
        pytest.param("metrics", False, marks=pytest.mark.slow),
        ("metrics", True),
        pytest.param("weighted_metrics", True, marks=pytest.mark.slow),
    ],
)
def test_every_metric_of_keras_is_that_of_keras(kind, streams):
    keras.config.set_floatx("float32")  # all that `in_top_k` takes
    keras.config.set_dtype_policy("float32")
    entries = of(metrics, NO_METRIC) + of(losses, NO_LOSS)
    if kind == "weighted_metrics":  # IoU warns of weights that are no integers
        entries = [e for e in entries if "IoU" not in e[0]]
    known = one_by_one(entries, metrics_add_up, **{kind: None})
    entries = [e for e, known in zip(entries, known) if known == streams]
    assert len(entries) > 10
    grouped = {}
    for name, thing in entries:
        grouped.setdefault(kind_of(name), []).append(thing)
    check_that_of_keras(
        {key: labels(key).astype("float32") for key in grouped},
        kind == "weighted_metrics",
        rtol=1e-5,
        loss={"mixed": "mse"},
        **{kind: grouped},
    )


# ----------------------------------------------- rows on one axis, or Keras's
def outcome(make, loss, shapes, metrics=(), weigh=None):
    """Logs of a step on 8 rows, or None where it fails."""
    rng = np.random.default_rng(0)
    keras.utils.set_random_seed(1)
    y_shape, outputs = shapes
    units = int(np.prod(outputs))
    model = make([kl.Dense(units, "sigmoid"), kl.Reshape(outputs)])
    kind = "metrics" if weigh is None else "weighted_metrics"
    model.compile("sgd", **quickly(model, {"loss": loss, kind: metrics}))
    y = rng.integers(0, 2, (8, *y_shape)).astype("float64")
    weights = None if weigh is None else rng.random((8, *weigh))
    try:
        history = model.fit(
            rng.random((8, 3)), y, 8, sample_weight=weights, verbose=0
        )
    except (ValueError, tf.errors.InvalidArgumentError):
        return None
    return list(history.history.values())


@pytest.mark.parametrize(
    ("loss", "shapes", "metrics", "weigh"),
    [
        ("mse", ((), (4,)), [], None),
        (RowWise(), ((), (4,)), [], None),
        ("mse", ((1,), (4,)), ["mse", "r2_score"], None),
        ("mse", ((4,), (4,)), [], (4,)),
        ("mse", ((4,), (4,)), [], (1,)),
        ("mse", ((1,), (1,)), [metrics.binary_crossentropy], None),
        ("mse", ((), (1,)), [metrics.binary_crossentropy], None),
        ("mse", ((), (1,)), ["accuracy", "auc", metrics.Recall()], ()),
        ("mse", ((4,), (4,)), ["accuracy", "auc"], (4,)),
        ("mse", ((2, 4), (2, 4)), [metrics.AUC(num_thresholds=5)], (2,)),
        ("mse", ((4,), (4,)), [metrics.F1Score()], (1,)),
        ("mse", ((4,), (4,)), [metrics.BinaryIoU(dtype="float64")], ()),
    ],
)
def test_labels_and_weights_fit_where_they_do_in_keras(
    loss, shapes, metrics, weigh
):
    expected = outcome(keras.Sequential, loss, shapes, metrics, weigh)
    found = outcome(
        lambda layers: tfgpipe.GPipe(layers, 2, 2), loss, shapes, metrics, weigh
    )
    assert (found is None) == (expected is None)
    for a, b in zip(found or [], expected or [], strict=True):
        np.testing.assert_allclose(a, b, 1e-9)
