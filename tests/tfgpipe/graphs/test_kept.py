"""What is kept of a graph, where the rest may be computed again."""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.cells import tracer
from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs import kept
from tfgpipe.graphs.kept import fewer_kept

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


@pytest.mark.parametrize("seed", range(6))
def test_choice_is_the_cheapest_of_all(seed, monkeypatch):
    """Of all sets of the tensors that are made, by trying each."""
    monkeypatch.setattr(kept, "_RISE", 0.0)
    with tf.Graph().as_default() as graph:
        x, made = some_graph(seed)
        needed = random.Random(seed).sample(made, 5)
        free = {t.ref() for t in x}
        every = [t for op in graph.get_operations() for t in op.outputs]

        def cost(chosen, price):
            ops = repeated(needed, free | {t.ref() for t in chosen})
            work = sum(
                round(price * kept._work(op, kept._START, 4)) for op in ops
            )
            return sum(max(1, tensor_bytes(t)) for t in chosen) + work

        network = kept._Network(needed, free, "CPU")
        for price in (0.05, 0.3, 1.0):
            found = network.cut(price)
            assert {t.ref() for t in found} <= {t.ref() for t in every}
            least = min(
                cost(chosen, price)
                for count in range(len(made) + 1)
                for chosen in itertools.combinations(made, count)
            )
            assert cost(found, price) <= least


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
def perceptrons():
    return [
        keras.Input((64,)),
        *(kl.Dense(64, "gelu", name=f"layer_{i}") for i in range(6)),
    ]


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_cells_keep_their_share(share, monkeypatch):
    made = []

    class Noted(tracer.CellFunctions):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(tracer, "CellFunctions", Noted)
    remat = {0: share, 1: "never"}
    model = tfgpipe.GPipe(perceptrons(), 2, 4, remat=remat)
    model.compile("sgd", "mse")
    x = np.ones((32, 64), "float32")
    model.train_on_batch(x, x)
    first, second = made
    assert 0 < first.kept_share <= share
    assert second.kept_share == 1


def test_share_that_is_too_small_is_refused():
    layers = [keras.Input((3, 4)), kl.Dense(4), kl.LSTM(4), kl.Dense(1)]
    model = tfgpipe.GPipe(layers, 1, 2, remat=0.01)
    model.compile("sgd", "mse")
    words = r"at least 0\.\d+ for cell 0\. Received: remat=0\.01"
    with pytest.raises(ValueError, match=words):
        model.train_on_batch(np.ones((8, 3, 4)), np.ones((8, 1)))
