"""Faults are named with their layers, and nothing is said of what is right."""

import functools
import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny
from keras import layers as kl
from quick import quick

import tfgpipe
from tfgpipe.cells import tracer
from tfgpipe.graphs import CellFunctions, cut
from tfgpipe.model import step
from tfgpipe.run import mini_batch

ROWS = 12


class LoopMixes(kl.Layer):
    """Rows are mixed in a loop."""

    def call(self, x):
        def body(i, x):
            return i + 1, x - 0.1 * tf.reduce_sum(x, 0, keepdims=True)

        return tf.while_loop(lambda i, x: i < 2, body, (0, x))[1]


class Average(kl.Layer):
    """A moving average of its inputs."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=shape[-1:], initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x, training=None):
        if training:
            new = keras.ops.mean(x, axis=0)
            self.mean.assign(0.9 * self.mean + 0.1 * new)
        return x


def dense(name, units=8, activation="tanh", **kwargs):
    return kl.Dense(units, activation, name=name, **kwargs)


def pipeline(*middle, k=3, m=3, optimizer="adam", loss="mse", **options):
    """Layers a, b, those in the middle, c and d."""
    layers = [dense("a"), dense("b"), *middle, dense("c"), dense("d", 4, None)]
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe([keras.Input((8,)), *layers], k, m, **options)
    model.compile(optimizer, loss)
    return model


def data(rows=ROWS):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 8)), rng.normal(size=(rows, 4))
    return x.astype(keras.config.floatx()), y.astype(keras.config.floatx())


def checked(model, *own):
    """The report; the model is as it was, and so is all that draws."""
    variables = [
        *model.variables,
        *model.metrics_variables,
        *model.optimizer.variables,
    ]
    before = [v.numpy() for v in variables]
    states = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that mix rows
        report = tfgpipe.check(model, *(own or data()))
    tiny.assert_same([v.numpy() for v in variables], before)
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    return report


def first_of(model, *own):
    report = checked(model, *own)
    assert not report.is_exact
    assert str(report.first) in str(report)
    return report.first


# ------------------------------------------------------------ what is right
def test_nothing_is_wrong_with_what_is_documented():
    model = pipeline(
        kl.Dropout(0.3, name="drop"),
        kl.BatchNormalization(name="normal"),
        Average(name="average"),
        schedule="1f1b",
    )
    report = checked(model)
    assert report.is_exact
    assert report.first is None
    assert "Exact: nothing differs" in str(report)


def test_one_micro_batch_is_keras():
    report = checked(
        pipeline(kl.Dropout(0.3), kl.BatchNormalization(), m=1, k=2)
    )
    assert not report.findings
    assert report.differences.keys() >= {"loss", "update"}


def transformer():
    inputs = keras.Input((5,), dtype="int32")
    x = kl.Embedding(9, 8)(inputs)
    x = x + kl.Embedding(5, 8)(keras.ops.arange(5))
    heads = kl.MultiHeadAttention(2, 4)
    y = kl.LayerNormalization()(x)
    x = kl.Add()([x, heads(y, y, use_causal_mask=True)])
    x = kl.Add()([x, kl.Dense(8, "gelu")(kl.LayerNormalization()(x))])
    model = tfgpipe.GPipe(keras.Model(inputs, kl.Dense(9)(x)), 3, 3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    ids = np.random.default_rng(0).integers(0, 9, (ROWS, 5))
    return model, ids, ids


def test_transformer_is_exact():
    """The gradient of the keys' bias is nothing but rounding."""
    assert not checked(*transformer()).findings


@pytest.mark.parametrize(
    "dtype", quick(["mixed_bfloat16", "mixed_float16"], ["mixed_float16"])
)
def test_sixteen_bits_are_exact(dtype):
    """With the scale of the loss that the mini-batch needs."""
    keras.config.set_dtype_policy(dtype)
    model = pipeline(kl.BatchNormalization(), gradient_dtype=dtype[6:])
    assert checked(model).is_exact


def test_functional_model_with_a_skip_is_exact(float64):
    inputs = keras.Input((8,))
    x = dense("a", kernel_regularizer="l2")(inputs)
    y = dense("b", activity_regularizer="l1")(x)
    y = kl.Concatenate()([kl.Add()([x, y]), inputs])
    model = keras.Model(inputs, dense("c", 4)(y))
    model = tfgpipe.GPipe(model, 3, 3, remat="always")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    weights = np.linspace(0.1, 1, ROWS)
    assert not checked(model, *data(), weights).findings


def test_loss_of_the_whole_mini_batch_is_exact():
    def dice(y, p):
        return 1 - tf.reduce_sum(y * p) / (9 + tf.reduce_sum(y + p))

    model = pipeline(loss=dice)
    model.fit(*data(), verbose=0)  # slots and metrics are no zeros
    assert not checked(model).findings


def test_loss_in_single_precision_of_a_model_in_double_is_exact(float64):
    def single(y, p):
        y, p = (keras.ops.cast(t, "float32") for t in (y, p))
        return keras.ops.mean(keras.ops.square(y - p), -1)

    model = pipeline(loss=single)
    assert not checked(model).findings


class Averaged(tfgpipe.GPipe):
    """Keeps an average of weights, as a model of Keras may."""

    def __init__(self, model, *args):
        super().__init__(model, *args)
        self.inner, self.average = model, keras.models.clone_model(model)

    def train_step(self, *args):
        logs = super().train_step(*args)
        for own, average in zip(self.inner.weights, self.average.weights):
            average.assign(0.9 * average + 0.1 * own)
        return logs


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_average_that_a_step_of_the_users_keeps_is_exact():
    x = keras.Input((8,))
    model = Averaged(keras.Model(x, kl.Dense(4)(x)), 1, 2)
    model.compile("sgd", "mse")
    assert not checked(model).findings


def test_replicas_are_exact():
    with tfgpipe.PipelineStrategy(2, 2).scope():
        model = pipeline(kl.BatchNormalization(), k=2, m=2)
    report = checked(model)
    assert report.is_exact
    assert "replicas: 2" in report.title


# ------------------------------------------------------------ what is wrong
def test_layer_that_mixes_rows_is_named():
    found = first_of(pipeline(LoopMixes(name="mixes")))
    assert found.kind == "rows"
    assert found.where == "layer 'mixes' of cell 1 on /device:CPU:1"
    assert found.what.startswith("mixes the rows of a batch")


def test_model_without_trained_weights_is_exact():
    model = pipeline(k=2)
    model.trainable = False
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nothing to train
        assert checked(model).is_exact


def test_what_cannot_be_tried_is_told():
    def noisy(x):
        return tf.map_fn(lambda row: row + tf.random.normal(row.shape), x)

    noise = kl.Lambda(noisy, name="noise")
    found = checked(pipeline(noise, remat="never", k=2)).findings
    texts = [f.what for f in found if f.kind == "rows"]
    assert [text[:33] for text in texts] == [
        "was not tried: it draws random nu"
    ]


def test_what_is_not_finite_is_told():
    spoils = kl.Lambda(lambda x: keras.ops.log(x - 100.0), name="spoils")
    found = first_of(pipeline(spoils))
    assert found.kind == "loss" and "StopOnNonFinite" in found.what


@pytest.fixture
def wrong_products(monkeypatch):
    """Lets the products be wrong of one device, or in some cells.

    Called with which cells these are, and whether in their backward pass.
    """
    right, add_in_order = mini_batch.tasks_of, cut.add_in_order
    inside, cells = [], []

    class Wrong(CellFunctions):
        """Its functions have wrong products."""

        def function(self, *args, **kwargs):
            inside.append(self.part)
            try:
                return super().function(*args, **kwargs)
            finally:
                inside.pop()

    def use(of_cells, backward=False):
        def tasks_of(made, of_batch, *more):
            cells[:] = of_batch
            return right(made, of_batch, *more)

        def functions(part, *how):
            is_wrong = of_cells(cells[part.index])
            return (Wrong if is_wrong else CellFunctions)(part, *how)

        def add_wrong(definition):
            add_in_order(definition)
            for node in [*definition.node] if inside else ():
                is_backward = node.name in inside[-1].backward
                if node.op == "MatMul" and is_backward is backward:
                    scale(definition, node)

        monkeypatch.setattr(mini_batch, "tasks_of", tasks_of)
        monkeypatch.setattr(tracer, "CellFunctions", functions)
        monkeypatch.setattr(tracer, "part_key", lambda part, _: part.index)
        monkeypatch.setattr(cut, "add_in_order", add_wrong)

    return use


def scale(definition, node):
    """Multiplies what a node makes by 1.01."""
    name = node.name
    factor = definition.node.add(op="Const", name=f"{name}_factor")
    factor.attr["dtype"].type = tf.float32.as_datatype_enum
    factor.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1.01))
    node.name = f"{name}_right"
    product = definition.node.add(
        op="Mul", name=name, input=[node.name, factor.name]
    )
    product.attr["T"].type = tf.float32.as_datatype_enum


def test_products_of_one_device_are_wrong(wrong_products):
    wrong_products(lambda cell: cell.device.endswith("CPU:1"))
    found = first_of(pipeline())
    assert found.kind == "forward"
    assert found.where == "layer 'b' of cell 1 on /device:CPU:1"
    assert 1e-3 < found.difference < 2e-2


def test_gradients_of_one_device_are_wrong(wrong_products):
    wrong_products(lambda cell: cell.device.endswith("CPU:1"), backward=True)
    other = dense("c", activation="elu")  # equal cells have one backward pass
    layers = [dense("a"), dense("b", activation="relu"), other]
    model = tfgpipe.GPipe([keras.Input((8,)), *layers, dense("d", 4)], 4, 3)
    model.compile("adam", "mse")
    report = checked(model)
    assert report.first.kind == "loss"
    assert report.first.where.startswith(
        "'g_pipe/b/kernel' of layer 'b' of cell 1"
    )
    assert report.first.what == "gradient"
    assert report.first.difference == pytest.approx(0.01, rel=0.1)


def test_what_is_wrong_in_the_step_of_fit_alone_is_told(monkeypatch):
    is_step = []

    def other(x):
        return 1.01 * x if is_step else x

    model = pipeline(kl.Lambda(other, name="other"), optimizer="sgd")
    train_step = tfgpipe.GPipe.train_step

    @functools.wraps(train_step)
    def step(self, data):
        is_step.append(True)
        try:
            return train_step(self, data)
        finally:
            is_step.clear()

    monkeypatch.setattr(tfgpipe.GPipe, "train_step", step)
    found = first_of(model)
    assert (found.kind, found.what) == ("loss", "loss")


def test_what_is_wrong_in_cells_alone_is_told(wrong_products):
    wrong_products(lambda cell: len(cell.steps) > 1)
    model = pipeline(optimizer="sgd")
    assert {f.kind for f in checked(model).findings} == {"loss"}


def test_update_by_another_gradient_is_told(monkeypatch):
    plain = step.update_on_devices

    def updated(optimizer, pairs, compiles):
        wrong = [
            (1.5 * gradient if "c/kernel" in v.path else gradient, v)
            for gradient, v in pairs
        ]
        plain(optimizer, wrong, compiles)

    monkeypatch.setattr(step, "update_on_devices", updated)
    sgd = keras.optimizers.SGD(1e-3)
    (found,) = checked(pipeline(optimizer=sgd)).findings
    assert found.kind == "update"
    assert found.where.startswith("'g_pipe/c/kernel' of layer 'c' of cell 2")


# ---------------------------------------------------------- what is refused
def test_error_leaves_the_model_as_it_was():
    class Failing(tfgpipe.GPipe):
        def compute_loss(self, *args, **kwargs):
            if not tf.executing_eagerly():
                raise RuntimeError("enough")
            return super().compute_loss(*args, **kwargs)

    layers = [dense("a"), kl.BatchNormalization(), dense("b", 4)]
    model = Failing([keras.Input((8,)), *layers], 2, 2)
    model.compile("adam", "mse")
    before = tiny.weights(model)
    with pytest.raises(RuntimeError, match="enough"):
        tfgpipe.check(model, *data())
    tiny.assert_same(tiny.weights(model), before)
    assert not model.run_eagerly
    assert model.train_function is None


def test_random_numbers_of_tensorflow_are_those_of_before():
    noise = kl.Lambda(lambda x: x + tf.random.normal(tf.shape(x)), name="noise")
    model = pipeline(noise, remat="never", k=2)
    tf.random.set_seed(5)
    expected = tf.random.uniform([3])
    tf.random.set_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random numbers without a seed
        assert tfgpipe.check(model, *data()).is_exact
    np.testing.assert_array_equal(tf.random.uniform([3]), expected)


def test_model_must_be_a_compiled_gpipe():
    plain = keras.Sequential([keras.Input((8,)), dense("a", 4)])
    plain.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match=r"must be a compiled `GPipe`.*sequent"
    ):
        tfgpipe.check(plain, *data())
    model = tfgpipe.GPipe([keras.Input((8,)), dense("a", 4)], 1)
    with pytest.raises(ValueError, match=r"must be compiled.*'g_pipe'"):
        tfgpipe.check(model, *data())


def test_data_must_be_one_mini_batch(dense_calls):
    model = pipeline()
    del dense_calls[:]
    x, y = data()
    with pytest.raises(ValueError, match="12 rows of x and 11 of y"):
        tfgpipe.check(model, x, y[1:])
    with pytest.raises(
        ValueError, match=r"12 rows of x and 3 of sample_weight"
    ):
        tfgpipe.check(model, x, y, np.ones(3))
    assert not dense_calls
