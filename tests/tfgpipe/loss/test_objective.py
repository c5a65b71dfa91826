"""Losses of whole mini-batches: what they see, and where gradients start."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from beside_keras import assert_close, normal, pipeline
from beside_keras import trained as train
from keras import layers as kl
from own_losses import Counting, CountingInTensorFlow, Drawing
from own_optimizers import Squaring
from quick import quick
from tiny import quickly

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


def stack():
    return [
        kl.Embedding(5, 4),
        kl.Dense(4, "tanh", kernel_regularizer="l2"),
        kl.Dense(3),
    ]


def trained(make, loss, rows=7):
    """Losses and weights after two steps."""
    keras.utils.set_random_seed(1)
    layers = stack()
    model = make(layers)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    compiling = quickly(model, {"loss": loss(layers)})
    model.compile(optimizer, **compiling)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, (rows, 2)), rng.random((rows, 2, 3))
    history = model.fit(x, y, rows, epochs=2, verbose=0).history["loss"]
    return [history, *model.get_weights()]


def reading(layers):
    """A common pattern: a penalty of weights that the loss adds by itself."""

    def loss(y_true, y_pred):
        table, kernel = layers[0].embeddings, layers[2].kernel
        error = keras.ops.mean(keras.ops.square(y_true - y_pred))
        rare = tf.gather(table.value, [3, 1, 3])
        return (
            error
            + 0.1 * keras.ops.sum(keras.ops.square(kernel))
            + keras.ops.sum(rare**2)
        )

    return loss


def gathering(layers):
    del layers

    def loss(y_true, y_pred):
        taken = tf.gather(y_pred, [0, 2, 2])
        return keras.ops.mean(keras.ops.square(taken - y_true[:3]))

    return loss


@pytest.mark.parametrize("loss", [reading, gathering])
def test_gradients_of_a_loss_of_the_user_are_those_of_keras(loss):
    expected = trained(keras.Sequential, loss)
    found = trained(lambda layers: tfgpipe.GPipe(layers, 3, 3), loss)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-14)


class Adding(kl.Layer):
    """Adds a loss of some shape and type."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, x):
        loss = {
            "integer": lambda: keras.ops.cast(7, "int32"),
            "units": lambda: keras.ops.mean(x**2, (0, 1)),
            "rows": lambda: keras.ops.mean(x**2, (1, 2)),
        }[self.kind]()
        self.add_loss(loss)
        return x


def added(make, kind, rows):
    def with_loss(layers):
        return make([*layers[:2], Adding(kind), layers[2]])

    return trained(with_loss, lambda _: "mse", rows=rows)


@pytest.mark.parametrize(
    ("kind", "m", "rows"), [("integer", 2, 6), ("units", 3, 7), ("rows", 1, 7)]
)
def test_numbers_that_layers_add_to_the_loss_are_summed(kind, m, rows):
    expected = added(keras.Sequential, kind, rows)
    found = added(lambda layers: tfgpipe.GPipe(layers, 2, m), kind, rows)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-14)


class LikeAnother(keras.regularizers.Regularizer):
    """A penalty of what differs from another weight, and from state."""

    def __init__(self, of):
        self.of = of

    def __call__(self, weight):
        distance = keras.ops.sum(keras.ops.square(weight - self.of()))
        rows = tf.gather(weight.value, [0, 0])  # and of itself, sparse
        return 0.1 * distance + 0.01 * keras.ops.sum(keras.ops.square(rows))


def siblings():
    """Weights that are pulled to each other, over cells; one to state."""
    first, last = kl.Dense(4, "tanh"), kl.Dense(4, "tanh")
    norm, table = kl.BatchNormalization(), kl.Embedding(5, 4)
    first.kernel_regularizer = LikeAnother(lambda: last.kernel)
    last.kernel_regularizer = LikeAnother(lambda: first.kernel)
    last.bias_regularizer = LikeAnother(lambda: norm.moving_mean * first.bias)
    table.embeddings_regularizer = LikeAnother(
        lambda: keras.ops.sum(tf.gather(last.kernel.value, [1, 1]))
    )
    return [keras.Input((2,)), table, first, norm, last, kl.Dense(3)]


def after_two_steps(model, optimizer, rows=6, **compiling):
    model.compile(optimizer, **quickly(model, {"loss": "mse", **compiling}))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, (rows, 2)), rng.random((rows, 2, 3))
    fitted = model.fit(x, y, rows, epochs=2, verbose=0)
    state = model.weights + model.optimizer.variables
    return [fitted.history["loss"], *(v.numpy() for v in state)]


@pytest.mark.parametrize(
    ("k", "loss"),
    [
        (1, "mse"),
        (2, keras.losses.mean_squared_error),
        pytest.param(2, "mse", marks=pytest.mark.slow),
    ],
)
def test_regularisers_that_read_other_weights_are_those_of_keras(k, loss):
    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.5)

    keras.utils.set_random_seed(1)
    model = keras.Sequential(siblings())
    expected = after_two_steps(model, sgd(), loss=loss)
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe(siblings(), k, 1)
    found = after_two_steps(model, sgd(), loss=loss)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-14)


def forgetful(cls):
    """A model whose loss leaves out what layers add to it."""

    class Forgetful(cls):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return keras.ops.mean(keras.ops.square(y - y_pred))

    return Forgetful


class Side(kl.Layer):
    """A part that nothing but `add_loss` depends on."""

    def __init__(self):
        super().__init__()
        self.inner = kl.Dense(3, kernel_regularizer="l2")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        self.add_loss(keras.ops.mean(self.inner(x) ** 2))
        return x


@pytest.mark.parametrize(
    ("k", "m"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2), (2, 2)],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_losses_that_are_left_out_have_no_gradients(k, m):
    def layers():
        keras.utils.set_random_seed(1)
        inner = [kl.Embedding(5, 4), Side(), kl.Dense(4, "tanh"), Side()]
        return [keras.Input((2,)), *inner, kl.Dense(3)]

    def adamw():
        return keras.optimizers.AdamW(0.1, 0.5)

    model = forgetful(keras.Sequential)(layers())
    expected = after_two_steps(model, adamw(), run_eagerly=True)
    model = forgetful(tfgpipe.GPipe)(layers(), k, m)
    found = after_two_steps(model, adamw())
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-14)


def small():
    return [keras.Input((4,)), kl.Dense(5, "tanh"), kl.Dense(3)]


POINTS = [(1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize(
    "loss",
    quick([Drawing, Counting, CountingInTensorFlow], [Drawing, Counting]),
)
def test_loss_of_rows_that_assigns_or_draws_does_so_once(loss):
    expected = train(small, keras.Sequential, normal(4), normal(3), loss=loss())
    for k, m in POINTS:
        model = pipeline(k, m)
        found = train(small, model, normal(4), normal(3), loss=loss())
        assert_close(found, expected)


def test_loss_that_an_optimizer_scales_by_itself_is_that_of_keras():
    expected, *found = (
        train(small, make, normal(4), normal(3), optimizer=Squaring(0.05))
        for make in (keras.Sequential, *(pipeline(*point) for point in POINTS))
    )
    for one in found:
        assert_close(one, expected)


def both(methods, cls=keras.Sequential):
    """A model of Keras, and a pipeline, with these methods."""
    return [type("Own", (methods, base), {}) for base in (cls, tfgpipe.GPipe)]


class SumOfBytes:
    """Adds what bytes add up to: 200 + 100 is 44."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        total = keras.ops.cast(x + x, y_pred.dtype)
        return keras.ops.mean((y - y_pred) ** 2 + 1e-3 * total[:, :3] * y_pred)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        own = {"bytes": keras.ops.mean(keras.ops.cast(x + x, y_pred.dtype))}
        return {**super().compute_metrics(x, y, y_pred, sample_weight), **own}


SumOfBytesInKeras, SumOfBytesInCells = both(SumOfBytes)


def scaled():
    return [keras.Input((4,)), kl.Rescaling(1 / 255), kl.Dense(3)]


@pytest.mark.parametrize(("k", "m"), POINTS)
def test_losses_and_metrics_get_the_bytes_that_are_given(k, m):
    x = np.random.default_rng(0).integers(0, 256, (7, 4)).astype("uint8")
    found, expected = (
        train(scaled, make, x, normal(3))
        for make in (
            lambda layers: SumOfBytesInCells(layers, k, m),
            SumOfBytesInKeras,
        )
    )
    assert_close(found, expected)


class Named:
    """Takes inputs by the names that the data have."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return keras.ops.mean((y - y_pred) ** 2 + x["a"] * y_pred)


NamedInKeras, NamedInCells = both(Named, keras.Model)


def two_inputs(make):
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    joined = kl.Dense(4, "tanh")(kl.Concatenate()([a, b]))
    return make([a, b], kl.Dense(3)(joined))


@pytest.mark.parametrize(("k", "m"), quick(POINTS, POINTS[-1:]))
def test_loss_reads_inputs_by_the_names_of_the_data(k, m):
    x = {"a": normal(3), "b": normal(2)}
    found, expected = (
        train(lambda: None, make, x, normal(3))
        for make in (
            lambda _: NamedInCells(two_inputs(keras.Model), k, m),
            lambda _: two_inputs(NamedInKeras),
        )
    )
    assert_close(found, expected)


class Adds(kl.Layer):
    """Adds a mean over rows to the loss."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


class Reports:
    """Adds to the loss by itself, and shows what is added."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        self.add_loss(keras.ops.mean(y_pred**2))
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        own = {"added": sum(self.losses)}
        return {**super().compute_metrics(x, y, y_pred, sample_weight), **own}

    def train_step(self, data):
        return {**super().train_step(data), "after": sum(self.losses)}


ReportsInKeras, ReportsInCells = both(Reports)


def adding():
    dense = kl.Dense(4, "tanh", kernel_regularizer="l2")
    return [keras.Input((4,)), dense, Adds(), kl.Dense(3)]


@pytest.mark.parametrize(("k", "m"), quick(POINTS, POINTS[-1:]))
def test_what_is_added_to_the_loss_is_read_in_the_step(k, m):
    found, expected = (
        shown(make)
        for make in (
            lambda layers: ReportsInCells(layers, k, m),
            ReportsInKeras,
        )
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


def shown(make):
    """What a model shows of two steps, and its weights after them."""
    keras.utils.set_random_seed(1)
    model = make(adding())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    logs = model.fit(normal(4), normal(3), 7, epochs=2, verbose=0).history
    evaluated = model.evaluate(normal(4), normal(3), 7, 0, return_dict=True)
    assert logs.keys() == {"loss", "added", "after"}
    return [
        *logs.values(),
        *(evaluated[name] for name in ("loss", "added")),
        *model.get_weights(),
    ]


class Calls(tfgpipe.GPipe):
    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        self(x, training=training)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def test_losses_of_another_call_are_refused():
    model = Calls(adding(), 2, 2)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="call of layer 'adds'"):
        model.fit(normal(4), normal(3), verbose=0)


def doubled(model):
    """A model of which `compute_loss` and `compute_metrics` are set."""
    loss, metrics = model.compute_loss, model.compute_metrics

    def compute_loss(*data, **told):
        return 2 * loss(*data, **told)

    def compute_metrics(x, y, y_pred, sample_weight=None):
        own = {"mean": keras.ops.mean(y_pred)}
        return {**metrics(x, y, y_pred, sample_weight), **own}

    model.compute_loss = compute_loss
    model.compute_metrics = compute_metrics
    return model


@pytest.mark.parametrize(("k", "m"), quick(POINTS, POINTS[-1:]))
def test_methods_that_are_set_on_the_model_are_used(k, m):
    found, expected = (
        train(
            small, lambda layers, f=f: doubled(f(layers)), normal(4), normal(3)
        )
        for f in (pipeline(k, m), keras.Sequential)
    )
    assert "mean" in found[0]
    assert_close(found, expected)
