"""What is kept of a graph, where the rest may be computed again."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs.cell_functions import fewer_kept

SIZES = (1, 2, 4, 8)


def repeated(tensors, known):
    """Operations that run for tensors of which some are known; None if many."""
    found, waiting = {}, [*tensors]
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() in known or tensor.op.name in found:
            continue
        if tensor.op.type == "Placeholder":
            return None
        found[tensor.op.name] = tensor.op
        waiting += tensor.op.inputs
    return [*found.values()]


def some_graph(seed):
    """Tensors that hang on each other, of several sizes; inputs first."""
    rng = random.Random(seed)
    x = [tf.compat.v1.placeholder(tf.float32, (1024,)) for _ in range(2)]
    found = [*x]
    while len(found) < 11:
        a, b = rng.choices(found[-4:], k=2)
        size = rng.choice(SIZES) * 1024
        parts = tf.reshape(tf.add(a, tf.reverse(b[:1], [0])), [-1])
        found.append(tf.tanh(tf.tile(parts[:1024], [size // 1024])))
    return x, found[2:]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.8])
def test_no_more_is_kept_than_is_allowed(share):
    with tf.Graph().as_default():
        x, made = some_graph(0)
        free = {t.ref() for t in x}
        found = fewer_kept(made, free, share)
    assert sum(map(tensor_bytes, found)) <= share * sum(map(tensor_bytes, made))
    assert repeated(made, free | {t.ref() for t in found}) is not None


def test_what_is_cheap_is_computed_again_first():
    """Of a matrix product and what follows, the product is kept."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, (256, 512))
        w = tf.compat.v1.placeholder(tf.float32, (512, 512))
        h = tf.matmul(x, w)
        needed = [h, tf.exp(h), tf.sin(h)]
        found = fewer_kept(needed, {x.ref(), w.ref()}, 0.34)
        assert [t.name for t in found] == [h.name]
        assert not fewer_kept(needed, {x.ref(), w.ref()}, 0.01)


def test_what_has_state_is_not_computed_again():
    with tf.Graph().as_default():
        drawn = tf.random.uniform((64, 64))
        needed = [drawn, drawn + 1.0]
        for share in (0.1, 0.6):
            assert [t.name for t in fewer_kept(needed, set(), share)] == [
                drawn.name
            ]


def test_equal_layers_may_be_kept_in_part():
    with tf.Graph().as_default():
        x = h = tf.compat.v1.placeholder(tf.float32, (64, 64))
        w = tf.compat.v1.placeholder(tf.float32, (64, 64))
        needed = []
        for _ in range(10):
            h = tf.matmul(h, w)
            needed.append(h)
        for share in (0.35, 0.65):
            found = fewer_kept(needed, {x.ref(), w.ref()}, share)
            assert 10 * share - 1.5 < len(found) <= 10 * share


# ---------------------------------------------------------------- in a pipeline


def test_share_that_is_too_small_is_refused():
    layers = [keras.Input((3, 4)), kl.Dense(4), kl.LSTM(4), kl.Dense(1)]
    model = tfgpipe.GPipe(layers, 1, 2, remat=0.01)
    model.compile("sgd", "mse")
    words = r"at least 0\.\d+ for cell 0\. Received: remat=0\.01"
    with pytest.raises(ValueError, match=words):
        model.train_on_batch(np.ones((8, 3, 4)), np.ones((8, 1)))
