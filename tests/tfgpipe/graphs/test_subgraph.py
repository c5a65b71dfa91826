"""Functions cut out of a traced graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import step_graph, types
from keras import layers as kl

import tfgpipe
from tfgpipe.graphs.cut import GraphCutter, WholeGraph


def traced(function, *specs):
    """The graph of a function, with its input and output tensors."""
    concrete = tf.function(function, autograph=False).get_concrete_function(
        *specs
    )
    inputs = concrete.inputs[: len(specs)]  # the others are captures
    return concrete.graph, inputs, concrete.structured_outputs


def cut(graph, options=None):
    """What cuts functions out of all of a graph."""
    names = {op.name for op in graph.get_operations()}
    options = options or {"autograph": False}
    return GraphCutter(WholeGraph(graph), names, options, "CPU")


def run(function, values, sums=()):
    """Calls a function that was cut, inside a graph as the engine does."""

    def step():
        known = {key: tf.constant(v) for key, v in values().items()}
        return function(known, [tf.constant(total) for total in sums])

    return tf.nest.map_structure(
        lambda t: t.numpy(), tf.function(step, autograph=False)()
    )


def test_cell_computes_once_what_its_layers_compute_alike():
    # Each attention makes the causal mask of its own.
    mask = kl.Lambda(
        lambda x: tf.where(
            tf.range(4)[:, None] >= tf.range(4), tf.ones([4, 4]), x
        )
    )
    model = tfgpipe.GPipe([mask, kl.Dense(4)] * 3, 1, 1)
    model.compile("sgd", "mse")
    graph = step_graph(model, np.ones([4, 4]), np.ones([4, 4]))
    assert types(graph).count("GreaterEqual") == 1
    assert types(graph).count("MatMul") > 3


def test_shapes_that_only_the_layer_knew_are_kept():
    def function(x):
        y = tf.numpy_function(lambda a: a, [x], tf.float32, stateful=False)
        y.set_shape([2])
        return y

    graph, (x,), y = traced(function, tf.TensorSpec([None]))
    part = cut(graph).function([x], [y])
    step = tf.function(lambda v: part({x.ref(): v}), autograph=False)
    concrete = step.get_concrete_function(tf.TensorSpec([None]))
    assert concrete.structured_outputs[0].shape == (2,)


# ------------------------------------------------------- what has to be carried


def test_sums_are_added_in_order_whatever_memory_is_free():
    """AddN would begin with the last: the others are still needed."""
    tensors = {}

    def function(a, b, c):
        a, b, c = tensors["sources"] = [2 * x for x in (a, b, c)]
        tensors["sum"] = tf.add_n([a, b, c])
        return tensors["sum"]

    spec = tf.TensorSpec([64])
    graph, inputs, _ = traced(function, spec, spec, spec)
    a, b, _ = tensors["sources"]
    options = {"experimental_attributes": {"_noinline": True}}
    part = cut(graph, options).function(inputs, [tensors["sum"], a, b])
    values = np.random.default_rng(0).normal(size=(3, 64)).astype("float32")
    known = {t.ref(): value for t, value in zip(inputs, values)}
    x, y, z = 2 * values
    found = run(part, lambda: known)[0]
    np.testing.assert_array_equal(found, x + y + z)
    assert (found != z + y + x).any()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_biases_of_convolutions_get_their_own_gradients(schedule):
    """In float32, in which TensorFlow fuses them with those of filters.

    Not those of very small images.
    """
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8, 8, 8, 4)).astype("float32") for _ in range(2))

    def trained(make):
        keras.utils.set_random_seed(1)
        layers = [kl.Conv2D(4, 3, padding="same") for _ in range(6)]
        model = make([keras.Input((8, 8, 4)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, epochs=2, verbose=0)
        return model.get_weights()

    found = trained(
        lambda layers: tfgpipe.GPipe(layers, 2, 2, schedule=schedule)
    )
    for a, b in zip(found, trained(keras.Sequential), strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6)
