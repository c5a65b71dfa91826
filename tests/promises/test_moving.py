"""Batch normalisations that move their statistics by rules of their own.

With one micro-batch, what a layer assigns is kept: the numbers are Keras's.
With several, the rule is seen in what it assigns, or refused.
"""

import keras
import numpy as np
import pytest
from beside_keras import check, normal, pipeline, trained
from keras import layers as kl
from keras import ops

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


class Keeps(kl.BatchNormalization):
    """Takes moments, and keeps its statistics."""

    def call(self, x, training=None, mask=None):
        mean, variance = self._moments(x, mask)
        if training:
            self.move(x, mean, variance)
        return (x - mean) / ops.sqrt(variance + 1e-3)

    def move(self, x, mean, variance):
        pass


class Unbiased(Keeps):
    """With the variance of a sample, as PyTorch's."""

    def move(self, x, mean, variance):
        n = ops.cast(ops.shape(x)[0], x.dtype)
        variance = variance * n / (n - 1)
        self.moving_mean.assign(0.9 * self.moving_mean + 0.1 * mean)
        self.moving_variance.assign(0.9 * self.moving_variance + 0.1 * variance)


class Subtracts(Keeps):
    """Moves by Keras's rule, written in another way."""

    def move(self, x, mean, variance):
        for v, new in (
            (self.moving_mean, mean),
            (self.moving_variance, variance),
        ):
            v.assign_add((new - v) * (1 - self.momentum))


class OfItsOwn(Keeps):
    """Has moments of its own."""

    def _moments(self, x, mask):
        return ops.mean(x, axis=0), ops.ones_like(self.moving_mean)

    def move(self, x, mean, variance):
        self.moving_mean.assign(0.9 * self.moving_mean + 0.1 * mean)


class Sets(kl.BatchNormalization):
    """Has another momentum while it is called."""

    def call(self, x, training=None, mask=None):
        own, self.momentum = self.momentum, 0.6
        try:
            return super().call(x, training=training, mask=mask)
        finally:
            self.momentum = own


class Scheduled(kl.BatchNormalization):
    """Has a momentum that is a variable, which it assigns."""

    def build(self, shape):
        super().build(shape)
        self.rate = self.add_weight(initializer="ones", trainable=False)

    def call(self, x, training=None, mask=None):
        self.rate.assign(self.rate * 0.9)
        own, self.momentum = self.momentum, self.rate.value
        try:
            return super().call(x, training=training, mask=mask)
        finally:
            self.momentum = own


def test_statistics_of_one_micro_batch_are_what_layers_assigned():
    """Others are in `test_cases.py`, with layers that read them."""

    def make():
        norms = Unbiased(center=False, scale=False), Scheduled()
        return [keras.Input((3,)), kl.Dense(3), *norms, kl.Dense(2)]

    check(make, normal(3), normal(2), [(2, 1)])


def test_statistics_of_micro_batches_move_by_the_rule_that_was_seen():
    """Those of what the model is given do not depend on micro-batches."""

    layers = []

    def make():
        plain = {"center": False, "scale": False}
        subtracts = Subtracts(momentum=0.7, **plain)
        norms = [Sets(**plain), subtracts, Keeps(**plain)]
        layers.append(norms)
        inputs = keras.Input((3,))
        outputs = [kl.Dense(1)(norm(inputs)) for norm in norms]
        return keras.Model(inputs, kl.concatenate(outputs))

    for model in (lambda plain: plain, pipeline(1, 2)):
        trained(make, model, normal(3), normal(3))
    for plain, norm in zip(*layers):
        for name in ("moving_mean", "moving_variance"):
            expected = getattr(plain, name).numpy()
            np.testing.assert_allclose(getattr(norm, name), expected, 1e-10)


RULE = r"constant momentum[^']*'own'.*Call"


@pytest.mark.filterwarnings("ignore:Layer 'own' mixes the rows")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        # Of a micro-batch's rows, n / (n - 1) is not that of the mini-batch's.
        (Unbiased, RULE),
        (Scheduled, RULE),
        (OfItsOwn, "leave its moments.*'own'"),
    ],
)
def test_statistics_of_micro_batches_of_another_rule_are_refused(kind, words):
    model = tfgpipe.GPipe([kind(name="own"), kl.Dense(2)], 1, 2)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=words):
        model.train_on_batch(normal(3)[:4], normal(2)[:4])
