"""The smoothed cross entropy is Keras's, of one-hot labels."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

from models.losses import SmoothedCrossentropy

CLASSES = 7
REDUCTIONS = ("mean_with_sample_weight", "sum_over_batch_size", "sum", None)


def batch(*shape):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, shape)
    logits = 3 * rng.standard_normal((*shape, CLASSES))
    return labels, logits, rng.random(shape)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_values_are_those_of_one_hot_labels(smoothing):
    for reduction, shape in itertools.product(REDUCTIONS, [(4,), (4, 3)]):
        check_values(smoothing, reduction, *batch(*shape))


def check_values(smoothing, reduction, labels, logits, weights):
    loss = SmoothedCrossentropy(smoothing, reduction=reduction)
    reference = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=smoothing, reduction=reduction
    )
    one_hot = np.eye(CLASSES)[labels]
    for sample_weight in (None, weights, (weights > 0.5).astype(int)):
        np.testing.assert_allclose(
            loss(labels, logits, sample_weight),
            reference(one_hot, logits, sample_weight),
            rtol=1e-12,
        )


@pytest.mark.usefixtures("float64")
def test_default_is_the_mean_over_what_is_not_padding():
    labels, logits, _ = batch(4, 3)
    weights = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    loss = SmoothedCrossentropy(0.1)
    values = SmoothedCrossentropy(0.1, reduction=None)(labels, logits)
    expected = np.asarray(values)[weights > 0].mean()
    np.testing.assert_allclose(loss(labels, logits, weights), expected)
    labels[weights == 0], logits[weights == 0] = 0, 100.0
    np.testing.assert_allclose(loss(labels, logits, weights), expected)


def test_logits_of_bfloat16_are_compared_in_float32():
    labels, logits, _ = batch(4, 3)
    logits = ops.cast(logits, "bfloat16")
    found = SmoothedCrossentropy(0.1)(labels, logits)
    assert found.dtype == "float32"
    expected = SmoothedCrossentropy(0.1)(labels, ops.cast(logits, "float32"))
    np.testing.assert_array_equal(found, expected)
