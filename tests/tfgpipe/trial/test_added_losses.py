"""Losses that layers add up over rows are told from means by a trial."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe

ops = keras.ops


class Adds(kl.Layer):
    def __init__(self, loss, **kwargs):
        super().__init__(**kwargs)
        self.loss = loss

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 3))

    def call(self, x):
        self.add_loss(self.loss(x, self.kernel))
        return x @ self.kernel


def warned(losses, batch_sizes=(12,), num_micro_batches=2, **kwargs):
    """The warnings of a step, where each loss has a layer of its name."""
    adding = [Adds(loss, name=name, **kwargs) for name, loss in losses.items()]
    layers = [keras.Input((5,)), kl.Dense(4), *adding, kl.Dense(2)]
    model = tfgpipe.GPipe(layers, 2, num_micro_batches)
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for size in batch_sizes:
            model.train_on_batch(np.ones((size, 5)), np.ones((size, 2)))
    return [str(w.message) for w in found if "add_loss" in str(w.message)]


LOSSES = {
    "sum": lambda x, w: ops.sum(ops.square(x)),
    "divided": lambda x, w: ops.mean(x) / ops.cast(ops.shape(x)[0], x.dtype),
    "largest": lambda x, w: ops.max(x),
}


def test_losses_over_unknown_rows_are_said_as_they_were_seen():
    texts = warned(LOSSES, batch_sizes=(8, 7))
    assert len(texts) == len(LOSSES)
    assert all("Divide a sum by the number of rows" in text for text in texts)


def test_losses_of_one_micro_batch_are_right():
    assert not warned(LOSSES, num_micro_batches=1)


class Router(kl.Layer):
    """Adds a loss by which all experts get as many tokens."""

    def build(self, shape):
        self.gate = kl.Dense(4, activation="softmax")
        self.gate.build(shape)

    def call(self, x):
        share = self.gate(x)
        flat = ops.reshape(share, (-1, 4))
        chosen = ops.one_hot(ops.argmax(flat, -1), 4, dtype=flat.dtype)
        self.add_loss(4 * ops.sum(ops.mean(flat, 0) * ops.mean(chosen, 0)))
        return x


def test_balancing_loss_of_a_router_behind_an_embedding_is_warned_of():
    """What biases get for zeros would hide what a table begins with."""
    keras.utils.set_random_seed(0)
    layers = [kl.Embedding(20, 8), Router(name="router"), kl.Flatten()]
    model = tfgpipe.GPipe(
        [keras.Input((6,), dtype="int32"), *layers, kl.Dense(1)], 2, 4
    )
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).integers(0, 20, (16, 6))
    with pytest.warns(UserWarning, match="'router' gives `add_loss`"):
        model.train_on_batch(x, np.ones((16, 1)))


class Reads(keras.Model):
    """Reads what a layer adds, and gives a function of it."""

    def __init__(self, function, adds, **kwargs):
        super().__init__(**kwargs)
        self.function, self.adds = function, adds
        self.inner = kl.Dense(4, activity_regularizer="l2", name="inner")
        self.outer = kl.Dense(1, name="outer")

    def build(self, shape):
        self.inner.build(shape)
        self.outer.build((None, 4))

    def call(self, x):
        y = self.outer(self.inner(x))
        read = self.function(ops.sum(self.inner.losses))
        if self.adds:
            self.add_loss(read)
            return y
        return y * read


def test_model_that_reads_losses_of_its_layers_is_judged_by_what_it_makes():
    def said(function, adds):
        model = tfgpipe.GPipe(Reads(function, adds), 1, 2)
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(6, 3))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.train_on_batch(x, np.ones((6, 1)))
        return [str(w.message) for w in found]

    assert not said(lambda loss: 0.5 * loss, True)
    (message,) = said(ops.square, True)
    assert "behind 'outer' gives `add_loss` what is no mean" in message
    (message,) = said(lambda loss: 0.5 * loss, False)
    assert "behind 'outer' mixes the rows" in message
