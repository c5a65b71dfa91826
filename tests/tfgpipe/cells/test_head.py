import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from own_losses import RowWise, compiled
from sharing_layers import Tied
from tiny import quickly

import tfgpipe
from tfgpipe.cells.head import sum_and_count

pytestmark = pytest.mark.usefixtures("float64")
losses = keras.losses

LOSSES = [
    losses.MeanSquaredError(dtype="float64"),
    losses.Huber(0.3, reduction="sum", dtype="float64"),
    losses.CosineSimilarity(dtype="float64"),
    losses.BinaryCrossentropy(
        from_logits=True, label_smoothing=0.1, dtype="float64"
    ),
    losses.LogCosh(reduction="mean_with_sample_weight", dtype="float64"),
    losses.KLDivergence(reduction="mean", dtype="float64"),
]


def data(shape, weights, mask):
    rng = np.random.default_rng(0)
    y, y_pred = rng.random(shape), tf.constant(rng.random(shape))
    sample_weight = {"rows": rng.random(shape[0]), "none": None}
    sample_weight["all"] = rng.random(shape[:-1])
    if mask:
        keep = rng.random(shape[:-1]) < 0.6
        keep[0] = False  # a row without any unmasked position
        y_pred._keras_mask = tf.constant(keep)
    return y, y_pred, sample_weight[weights]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize(
    ("shape", "weights", "mask"),
    [
        ((6, 3), "none", False),
        ((6, 3), "rows", False),
        ((6, 3), "rows", True),
        ((6, 4, 3), "none", False),
        ((6, 4, 3), "none", True),
        ((6, 4, 3), "all", False),
        ((6, 4, 3), "all", True),
    ],
)
def test_sums_and_counts_of_parts_make_the_loss_of_the_whole(
    loss, shape, weights, mask
):
    y, y_pred, sample_weight = data(shape, weights, mask)
    expected = loss(y, y_pred, sample_weight)
    total, count = 0.0, 0.0
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        piece = y_pred[part]
        if mask:
            piece._keras_mask = y_pred._keras_mask[part]
        weight = None if sample_weight is None else sample_weight[part]
        s, c = sum_and_count(loss, y[part], piece, weight)
        total, count = total + s, count + c
    if loss.reduction == "sum":
        count = 1.0
    np.testing.assert_allclose(total / count, expected, 1e-12)


def test_ignored_classes_count_as_masked():
    loss = losses.SparseCategoricalCrossentropy(ignore_class=0)
    y = np.array([[0, 1, 2], [0, 0, 1], [2, 2, 2]])
    y_pred = tf.nn.softmax(np.random.default_rng(0).random((3, 3, 3)))
    parts = [
        sum_and_count(loss, y[i : i + 1], y_pred[i : i + 1], None)
        for i in range(3)
    ]
    found = sum(s for s, _ in parts) / sum(c for _, c in parts)
    np.testing.assert_allclose(found, loss(y, y_pred), 1e-12)


class Flat(RowWise):
    """Several values for a row, one after the other."""

    def call(self, y, y_pred):
        return keras.ops.reshape((y - y_pred) ** 4, (-1,))


class RowWiseOnlyByName(RowWise):
    def call(self, y, y_pred):
        return keras.ops.mean((y - y_pred) ** 4)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("cls", "reduction", "weights"),
    [
        (RowWise, "mean_with_sample_weight", np.arange(7.0)),
        (Flat, "sum_over_batch_size", None),
    ],
)
def test_loss_of_the_user_that_adds_rows_goes_with_early_gradients(
    cls, reduction, weights
):
    x = np.random.default_rng(0).standard_normal((7, 3))

    def train(make):
        keras.utils.set_random_seed(0)
        model = make([kl.Dense(3), kl.Dense(2)])
        compiling = quickly(model, {"loss": cls(reduction=reduction)})
        model.compile("sgd", **compiling)
        model.fit(  # of unknown rows
            x, x[:, :2], 4, sample_weight=weights, shuffle=False, verbose=0
        )
        return [w.numpy() for w in model.weights]

    found = train(lambda layers: tfgpipe.GPipe(layers, 2, 3, schedule="1f1b"))
    for a, b in zip(found, train(keras.Sequential), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_loss_of_the_user_that_is_a_scalar_is_refused():
    with pytest.raises(ValueError, match=r"value for each row.*RowWiseOnly"):
        compiled(loss=RowWiseOnlyByName())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_counts_that_follow_from_a_weight_assigned_before_are_known(schedule):
    """Of a loss of the user's, with rows known at run time only."""
    x = np.random.default_rng(0).standard_normal((7, 3))

    def trained(make):
        keras.utils.set_random_seed(0)
        dense = kl.Dense(3)
        layers = [kl.SpectralNormalization(dense), kl.Dense(3), Tied(dense)]
        model = make([keras.Input((3,)), *layers])
        model.compile("sgd", **quickly(model, {"loss": RowWise()}))
        model.fit(x, x, 4, shuffle=False, verbose=0)
        return [v.numpy() for v in model.variables]

    found = trained(
        lambda layers: tfgpipe.GPipe(
            layers, 2, 3, schedule=schedule, layers_per_cell=[2, 1]
        )
    )
    for a, b in zip(found, trained(keras.Sequential), strict=True):
        np.testing.assert_allclose(a, b, 1e-10)


@pytest.mark.parametrize("ignored", [None, 0])
@pytest.mark.parametrize("weighs", [False, True])
def test_one_micro_batch_has_the_bits_of_keras(ignored, weighs):
    """Keras divides by counts of masks before it adds up."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (2, 7, 5))
    weights = rng.random((7, 5)) if weighs else None

    def train(make):
        keras.utils.set_random_seed(0)
        model = make([kl.Embedding(3, 4, mask_zero=True), kl.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=ignored
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        history = model.fit(
            x, y, 4, 2, sample_weight=weights, shuffle=False, verbose=0
        )
        return [*history.history["loss"], *model.get_weights()]

    found = train(lambda layers: tfgpipe.GPipe(layers, 2, 1))
    for a, b in zip(found, train(keras.Sequential), strict=True):
        np.testing.assert_array_equal(a, b)
