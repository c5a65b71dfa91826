"""What layers return and cost, where rows are not those of the batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from keras import ops
from kinds import Plain
from tiny import assert_close, quickly

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def trained(model, x, y):
    compiling = {"optimizer": keras.optimizers.SGD(0.3, momentum=0.9)}
    model.compile(**quickly(model, {**compiling, "loss": "mse"}))
    losses = [model.train_on_batch(x, y) for _ in range(2)]
    return losses, [w.numpy() for w in model.weights]


def check(make, x, y, settings):
    """Compares pipelines with Keras."""

    def made(wrap):
        keras.utils.set_random_seed(3)
        given = make()
        return given if isinstance(given, keras.Model) else wrap(given)

    expected = trained(made(Plain), x, y)
    for k, m in settings:
        keras.utils.set_random_seed(3)
        model = tfgpipe.GPipe(make(), k, m)
        assert_close(trained(model, x, y), expected)
    return model


# ------------------------------------------- an axis that joins that of rows
def frames_as_rows():
    return [
        kl.Dense(6),
        kl.Lambda(lambda t: ops.reshape(t, (-1, 6))),
        kl.Dense(3, activation="tanh"),
        kl.Lambda(lambda t: ops.reshape(t, (-1, 5, 3))),
        kl.Dense(2),
    ]


def video():
    x = keras.Input((5, 6, 6, 1))
    h = ops.reshape(x, (-1, 6, 6, 1))
    h = kl.GlobalAveragePooling2D()(kl.Conv2D(2, 3)(h))
    h = kl.SimpleRNN(3)(ops.reshape(h, (-1, 5, 2)))
    return keras.Model(x, kl.Dense(2)(h))


def test_layers_that_fold_an_axis_into_the_batch_are_those_of_keras():
    settings = [(1, 1), (2, 3)]  # 5 rows: 1, 2 and 2
    x, y = normal(5, 5, 6), normal(5, 5, 2)
    model = check(frames_as_rows, x, y, settings)
    dense = [(6, 6), (6, 3), (3, 2)]  # 5 frames each, and an activation
    flops = sum(5 * (2 * a * b + b) for a, b in dense) + 5 * 3
    assert sum(cell.cost for cell in model.cells()) == flops


def test_functional_models_that_fold_an_axis_are_those_of_keras():
    check(video, normal(4, 5, 6, 6, 1), normal(4, 2), [(1, 1), (2, 2)])


def test_costs_that_are_given_in_between_leave_the_others_to_be_estimated():
    layers = frames_as_rows()
    layers[2] = (layers[2], 7.0)
    model = tfgpipe.GPipe([keras.Input((5, 6)), *layers], 1)
    assert [cell.cost for cell in model.cells()] == [5 * 78 + 7 + 5 * 14]


class Pairs(kl.Layer):
    """Pairs of rows, which one example has not."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = kl.Dense(3)

    def build(self, shape):
        self.dense.build((None, 3))

    def call(self, x):
        pairs = ops.reshape(x, (-1, 2, 3))
        return ops.reshape(self.dense(pairs), (-1, 3))


def test_layers_that_fail_on_one_example_count_by_two():
    def make():
        return [kl.Dense(3), Pairs()]

    model = check(make, normal(4, 3), normal(4, 3), [(2, 1)])
    assert [cell.cost for cell in model.cells()] == [21, 21]


def similarities():
    x = keras.Input((6,))
    h = kl.Dense(3)(x)
    return keras.Model(x, ops.matmul(h, ops.transpose(h)))


def test_similarities_of_all_rows_are_those_of_keras_for_one_micro_batch():
    check(similarities, normal(4, 6), normal(4, 4), [(1, 1), (2, 1)])


# ---------------------------------------------------------------- other dtypes
def hashed(t):
    return t % 7 + ops.cast(t > 2**35, "int64")


def test_functions_of_integers_are_traced_with_integers():
    def make():
        return [kl.Lambda(hashed), kl.Embedding(9, 3), kl.Dense(2)]

    x = np.array([[1, 2], [3, 4], [2**36 + 1, 5]])
    check(make, x, normal(3, 2, 2), [(2, 2)])


class Positions(kl.Layer):
    """Adds what a table has for int64 positions; its ids are int32."""

    def __init__(self, table, **kwargs):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        positions = tf.range(2, dtype="int64")
        return x + ops.take(self.table.embeddings, positions, axis=0)


@pytest.mark.parametrize("k", [1, 2])
def test_a_table_is_looked_up_by_integers_of_several_sizes(k):
    def make():
        table = kl.Embedding(9, 3)
        return [table, Positions(table), kl.Dense(2)]

    x = np.array([[1, 2], [3, 4], [1, 5]], "int32")
    check(make, x, normal(3, 2, 2), [(k, 2)])
