import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from kinds import Block

import tfgpipe
from tfgpipe.trace import Tracer

SPEC = tf.TensorSpec([None, 4])


def called_functions(layers, k, m=2):
    """Names of the functions that the calls in a training step call."""
    model = tfgpipe.GPipe(layers, k, m, remat="always")
    model.compile("sgd", "mse")
    x = tf.ones([4, 6, 4])
    y = tf.zeros_like(model(x))
    model._prepare(x, y, None, True)
    graph = (
        tf.function(model.train_step, autograph=False)
        .get_concrete_function((x, y))
        .graph
    )
    return {
        op.get_attr("f").name
        for op in graph.get_operations()
        if "PartitionedCall" in op.type
    }


def test_equal_cells_share_their_functions():
    """The first has no gradient by its input, the last has the loss."""
    names = called_functions([Block(4) for _ in range(8)], k=4)
    assert len(names) == 5  # of 8: two cells in the middle share both, and
    # the first cell's forward function is theirs too


def test_cells_that_differ_in_a_constant_do_not_share():
    names = called_functions(
        [kl.LayerNormalization(epsilon=10.0**-i) for i in range(1, 7)], k=6
    )
    assert len(names) == 12


def test_functions_with_equal_graphs_are_traced_to_one():
    trace = Tracer(eagerly=False, jit_compile=False)
    double = trace(lambda x: {"y": x * 2.0, "none": None}, (SPEC,))
    again = trace(lambda z: {"y": z * 2.0, "none": None}, (SPEC,))
    other = trace(lambda x: {"y": x * 3.0, "none": None}, (SPEC,))
    swapped = trace(lambda x: {"none": x * 2.0, "y": None}, (SPEC,))
    assert double is again
    assert len({id(double), id(other), id(swapped)}) == 3


def test_loops_are_compared_by_what_they_compute():
    def loop(factor):
        return lambda x: tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, x * factor), (0, x)
        )

    trace = Tracer(eagerly=False, jit_compile=False)
    first, second = trace(loop(2.0), (SPEC,)), trace(loop(2.0), (SPEC,))
    assert first is second
    assert first is not trace(loop(4.0), (SPEC,))


def test_functions_that_capture_are_not_shared():
    trace = Tracer(eagerly=False, jit_compile=False)
    a, b = tf.constant(2.0), tf.constant(3.0)
    first = trace(lambda x: x * a, (SPEC,))
    second = trace(lambda x: x * b, (SPEC,))
    np.testing.assert_array_equal(first(tf.ones([1, 4])), 2 * np.ones((1, 4)))
    np.testing.assert_array_equal(second(tf.ones([1, 4])), 3 * np.ones((1, 4)))


def test_eagerly_the_function_is_left_as_it_is():
    def function(x):
        return x

    assert Tracer(True, False)(function, (SPEC,)) is function


def test_seeded_layers_that_share_draw_their_own_masks():
    """Seeds are arguments, so equal dropout layers share functions."""
    layers = [kl.Dropout(0.5, seed=i) for i in range(3)]
    assert len(called_functions(layers + [kl.Dense(4)], k=4)) <= 4
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe([kl.Dropout(0.5, seed=1), kl.Dropout(0.5, seed=2)], 2)
    out = model(np.ones((1, 200)), training=True).numpy()
    assert 20 < (out != 0).sum() < 80  # a quarter, not a half
