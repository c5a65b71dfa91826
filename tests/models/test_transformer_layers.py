"""Layers of Transformers: what they compute, beside a few lines of NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.attention_layers import CrossAttention, SelfAttention
from models.transformer_layers import FeedForward, TokenEmbedding, sinusoids

DIM, HEADS, HEAD_DIM = 6, 3, 4
# Not all positions of a row are seen; those that are need not be first.
VISIBLE = np.array([[True, True, False, True, False], [True] * 5])


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(keras.config.floatx())


def randomize(layer, scale=1.0):
    """Gives a built layer weights that are all different from 0 and 1."""
    rng = np.random.default_rng(1)
    layer.set_weights(
        [scale * rng.standard_normal(w.shape) for w in layer.get_weights()]
    )
    return layer


def ids(*shape, high=9):
    return np.random.default_rng(0).integers(1, high, shape).astype("int32")


# ----------------------------------------------------------------- positions
def test_sinusoids_are_those_of_the_paper():
    found = np.asarray(sinusoids(3, 4, DIM, "float64"))
    for row, position in enumerate(range(3, 7)):
        for i in range(DIM // 2):
            angle = position / 10_000 ** (2 * i / DIM)
            np.testing.assert_allclose(found[row, i], np.sin(angle))
            np.testing.assert_allclose(found[row, DIM // 2 + i], np.cos(angle))


@pytest.mark.usefixtures("float64")
def test_embedding_is_the_scaled_row_of_the_table_and_the_position():
    layer = TokenEmbedding(9, DIM, 5)
    tokens = ids(2, 5)
    found = layer(tokens)
    table = layer.get_weights()[0]
    positions = np.asarray(sinusoids(0, 5, DIM, "float64"))
    expected = table[tokens] * np.sqrt(DIM) + positions
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    later = layer(tokens[:, 2:], first_position=2)
    np.testing.assert_allclose(later, expected[:, 2:], rtol=1e-12)


# -------------------------------------------------------------- feed-forward
def layer_norm(x, gamma, beta):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * gamma + beta


@pytest.mark.usefixtures("float64")
def test_feed_forward_is_prenorm_with_a_shortcut():
    layer = FeedForward(DIM, 8)
    x = normal(2, 5, DIM)
    layer(x)
    gamma, beta, w1, b1, w2, b2 = randomize(layer).get_weights()
    hidden = np.maximum(layer_norm(x, gamma, beta) @ w1 + b1, 0)
    np.testing.assert_allclose(layer(x), x + hidden @ w2 + b2, rtol=1e-10)


# ----------------------------------------------------------------- attention


def randomized(layer, *shapes):
    layer.build(*shapes)
    return randomize(layer, 0.7)


def gradients(layer, compute, *arrays):
    """Of the sum of squares of `compute`, with regard to all."""
    sources = [tf.convert_to_tensor(array) for array in arrays]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        total = tf.reduce_sum(compute(*sources) ** 2)
    return tape.gradient(
        total, [*sources, *(w.value for w in layer.trainable_weights)]
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_attention_and_its_gradients_are_those_of_keras(kind):
    x, memory = (normal(2, n, DIM, seed=n) for n in (4, 5))
    if kind == "cross":
        layer = CrossAttention(DIM, HEADS, HEAD_DIM)
        randomized(layer, x.shape, memory.shape)
        inputs = x, memory
    else:
        layer = SelfAttention(DIM, HEADS, HEAD_DIM, causal=kind == "causal")
        inputs = (memory,)
        randomized(layer, memory.shape)

    def keras_attention(x, memory=None):
        h = layer.norm(x)
        return x + layer.attention(
            h,
            h if memory is None else memory,
            attention_mask=VISIBLE[:, None],
            use_causal_mask=kind == "causal",
        )

    computes = (lambda *x: layer(*x, visible=VISIBLE)), keras_attention
    outputs = [compute(*inputs) for compute in computes]
    np.testing.assert_allclose(*outputs, rtol=1e-9, atol=1e-9)
    found, expected = (
        gradients(layer, compute, *inputs) for compute in computes
    )
    assert len(found) == len(inputs) + 10  # two of the norm, four dense layers
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("parts", [(3, 1, 1), (2, 3)])
def test_steps_of_self_attention_are_the_call_in_parts(parts):
    layer = SelfAttention(DIM, HEADS, HEAD_DIM, causal=True)
    x = normal(2, 5, DIM)
    randomized(layer, x.shape)
    cache, found, start = layer.empty_cache(2), [], 0
    for part in parts:
        y, cache = layer.step(x[:, start : start + part], cache)
        found.append(y)
        start += part
    assert cache[0].shape == (2, 5, HEADS, HEAD_DIM)
    np.testing.assert_allclose(
        np.concatenate(found, axis=1), layer(x), rtol=1e-10
    )


@pytest.mark.usefixtures("float64")
def test_step_of_cross_attention_is_the_call():
    layer = CrossAttention(DIM, HEADS, HEAD_DIM)
    x, memory = (normal(2, n, DIM, seed=n) for n in (4, 5))
    randomized(layer, x.shape, memory.shape)
    found = layer.step(x, layer.project(memory), VISIBLE)
    np.testing.assert_allclose(
        found, layer(x, memory, visible=VISIBLE), rtol=1e-10
    )
