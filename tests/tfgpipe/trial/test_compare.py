"""What differs is told from rounding, and said as it was seen."""

import keras
import pytest
import tensorflow as tf
from tried import said_of

import tfgpipe

ops = keras.ops
DTYPES = ("bfloat16", "mixed_bfloat16", "float16", "float32", "float64")


@pytest.fixture(params=DTYPES)
def dtype(request):
    before = keras.config.floatx(), keras.config.dtype_policy()
    if request.param == "float64":
        keras.config.set_floatx("float64")
    keras.config.set_dtype_policy(request.param)
    keras.utils.set_random_seed(0)
    yield request.param
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def said(layer, *shape):
    layer.build((None, *shape))
    return said_of([layer], (None, *shape))


class Block(keras.layers.Layer):
    """A part of a transformer, with biases, as in GPT-2."""

    def __init__(self, units):
        super().__init__(name="own")
        normal = keras.initializers.RandomNormal(stddev=0.02)
        self.attention = keras.layers.MultiHeadAttention(
            2, units // 2, kernel_initializer=normal
        )
        self.dense = keras.layers.Dense(
            2 * units, "relu", kernel_initializer=normal
        )
        self.back = keras.layers.Dense(units, kernel_initializer=normal)

    def build(self, shape):
        self.attention.build(shape, shape)
        self.dense.build(shape)
        self.back.build((*shape[:-1], self.dense.units))

    def call(self, x):
        x = x + self.attention(x, x, use_causal_mask=True)
        return x + self.back(self.dense(x))


def test_rounding_of_a_sum_of_many_terms_is_no_difference(dtype):
    """TensorFlow adds up the gradient of a bias in its dtype."""
    assert not said(Block(16), 40, 16)


class Pooled(keras.layers.Layer):
    """Means over positions, weighed by a score."""

    def __init__(self):
        super().__init__(name="own")
        self.score = keras.layers.Dense(1)
        self.dense = keras.layers.Dense(8)

    def build(self, shape):
        self.score.build(shape)
        self.dense.build(shape)

    def call(self, x):
        share = ops.softmax(self.score(x), axis=1)
        return ops.sum(share * self.dense(x), axis=1)


def test_gradient_that_is_all_rounding_is_no_difference(dtype):
    """The same bias for all scores changes nothing."""
    assert not said(Pooled(), 12, 16)


def _mixing(gradient):
    return tf.custom_gradient(lambda x: (tf.identity(x), gradient))


def _number(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


GRADIENTS = {
    "by their number": lambda dy: dy / _number(dy),
    "of one norm": lambda dy: tf.clip_by_norm(dy, 1.0),
    "of the first row": lambda dy: dy + 0.5 * dy[:1],
    "of the largest": lambda dy: dy + ops.max(dy, axis=0),
}


class Dense(keras.layers.Layer):
    """A dense layer beside a large one, whose gradients mix rows."""

    def __init__(self, gradient, use):
        super().__init__(name="own")
        self.mixing, self.use = _mixing(gradient), use
        self.large = keras.layers.Dense(16)

    def build(self, shape):
        self.large.build(shape)
        self.kernel = self.add_weight((shape[-1], 16), name="kernel")
        self.bias = self.add_weight((16,), name="bias")

    def call(self, x):
        kernel, bias = map(ops.convert_to_tensor, (self.kernel, self.bias))
        y = ops.matmul(x, ops.cast(kernel, x.dtype))
        bias = ops.broadcast_to(ops.cast(bias, x.dtype), ops.shape(y))
        if self.use == "bias":
            return self.large(x) + y + self.mixing(bias)
        return self.large(x) + self.mixing(y + bias)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_mix_rows_are_found_in_each_dtype(name, dtype):
    use = "bias" if (len(name) + len(dtype)) % 2 else "all"
    found = said(Dense(GRADIENTS[name], use), 12, 16)
    assert len(found) == 1
    assert "has a gradient with respect to" in found[0]
    assert ("'bias'" in found[0]) == (use == "bias")


class Regularised(keras.layers.Dense):
    """A dense layer of a user's, which is tried."""


REGULARIZERS = {
    "sum": lambda y: ops.sum(ops.square(y)),
    "mean": lambda y: ops.mean(ops.square(y)),
    "mean of sums": lambda y: ops.sum(ops.mean(ops.square(y), axis=0)),
    "largest": lambda y: ops.max(y),
}


def of_regularizer(name):
    regularizer = REGULARIZERS[name]
    return said(Regularised(4, activity_regularizer=regularizer), 3)


def test_activity_regularizer_that_is_a_sum_is_right(dtype):
    """Keras divides it by the number of rows."""
    assert not of_regularizer("sum")


@pytest.mark.parametrize("name", ["mean", "mean of sums"])
def test_activity_regularizer_that_is_a_mean_already_is_told(name, dtype):
    (message,) = of_regularizer(name)
    assert "'regularised' gives `add_loss` what is no mean over rows" in message
    assert "`activity_regularizer` returns, which must be a sum" in message


@pytest.mark.parametrize(("name", "times"), [("sum", 1.0), ("mean", 2.0)])
def test_activity_regularizer_comes_out_as_the_warning_says(name, times):
    """Of two micro-batches a mean over rows is twice what it is in Keras."""
    x = tf.random.stateless_normal((8, 3), (1, 2))

    def layers():
        keras.utils.set_random_seed(0)
        own = Regularised(4, activity_regularizer=REGULARIZERS[name])
        return [keras.Input((3,)), own, keras.layers.Dense(3)]

    def zero(y, prediction):
        return ops.sum(0.0 * prediction, axis=-1)

    plain = keras.Sequential(layers())
    pipeline = tfgpipe.GPipe(layers(), 2, 2, trial="off")
    for model in (plain, pipeline):
        model.compile("sgd", zero)
    expected = plain.evaluate(x, x, batch_size=8, verbose=0)
    found = pipeline.evaluate(x, x, batch_size=8, verbose=0)
    assert found == pytest.approx(times * expected, rel=1e-5)
