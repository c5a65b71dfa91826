"""One layer, timed: which tasks it has, and what it returns."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

from tfgpipe.costs import Placed
from tfgpipe.profiles.lone_layer import AsWritten, LayersAlone
from tfgpipe.sequence import source_of

BEHIND, FIRST, FORWARD = "behind weights", "first", "without weights"


def timed_and_values(layer, place, jit_compile=False, shape=(3,), others=None):
    """A layer in its place, built; before others there is one with weights."""
    x = tf.random.stateless_normal((2, *shape), [1, 2])
    layer.build((None, *shape))
    layers = [layer]
    if place == BEHIND:
        layers = [kl.Dense(shape[-1]), layer]
    elif place == FORWARD:
        layer.trainable = False
    placed = Placed(source_of(layers), keras.KerasTensor((None, *shape)))
    model = LayersAlone(placed, x, "CPU:0", jit_compile)
    known, k = model.start, len(layers) - 1
    if k:
        values = model.values(0, known)
        made = model.alone(0, None).outputs(values)
        known = model.behind(0, known, made)
    return model.alone(k, others), model.values(k, known)


def test_others_are_read_between_two_tasks_and_in_none():
    others = tf.ones([5])
    timed, values = timed_and_values(kl.Dense(4), FIRST, others=others)
    names = [*timed.seconds(values)]
    assert names == [*timed_and_values(kl.Dense(4), FIRST)[0].seconds(values)]
    (call,) = [
        op
        for op in timed._timed._concrete.graph.get_operations()
        if "PartitionedCall" in op.type
    ]
    name = call.get_attr("f").name
    library = timed._timed._concrete.graph.as_graph_def().library
    (run,) = [f for f in library.function if f.signature.name == name]
    argument = run.signature.input_arg[-1].name
    reads = [node for node in run.node_def if argument in node.input]
    assert {node.op for node in reads} == {"Sum"}
    assert len(reads) == 4 * len(names) - 1


def test_compiled_loop_is_one_backward_task():
    layer = kl.GRU(3, return_sequences=True)
    timed, values = timed_and_values(layer, BEHIND, True, shape=(4, 3))
    assert [*timed.seconds(values)] == [
        "forward",
        "backward_first",
        "backward",
    ]


def test_state_stays_as_it_was():
    layer = kl.BatchNormalization()
    timed, values = timed_and_values(layer, BEHIND)
    timed.seconds(values)
    timed.outputs(values)
    np.testing.assert_array_equal(layer.moving_mean, [0, 0, 0])


def test_what_only_controls_others_is_run():
    calls = []

    def work(x):
        calls.append(x)
        return x

    def chain(x):
        for _ in range(3):
            task = tf.numpy_function(work, [x], tf.float32, stateful=False)
            with tf.control_dependencies([task]):
                time = tf.timestamp()
        return [time]

    function = AsWritten(chain)
    for _ in range(2):
        function(tf.ones((2,)))
    assert len(calls) == 6
