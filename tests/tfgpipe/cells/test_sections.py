"""Where in a graph each call of a layer begins."""

import keras
import pytest
import tensorflow as tf
from keras import layers as kl
from traces import traced

from tfgpipe.cells.sections import is_whole

SPEC = tf.TensorSpec([None, 4])


def names(model):
    """Of the sections but the first and the last one: of no layer."""
    first, *found, last = model.sections
    assert first.layer is last.layer is None
    return [section.name for section in found]


class Block(kl.Layer):
    """A layer of a user's, with layers inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.one, self.two = kl.Dense(4, name="one"), kl.Dense(4, name="two")

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)

    def call(self, x):
        return tf.sin(self.two(self.one(x) + x))


def test_calls_inside_of_models_and_of_own_layers_begin_sections():
    inner = keras.Sequential([kl.Dense(4, name="d"), Block(name="b")], name="m")
    inner.build((None, 4))
    found = names(traced([inner, kl.ReLU(name="r")], SPEC))
    assert [n for n in found if not n.startswith("m/functional")] == [
        *("m", "m/d", "m/b", "m/b/one", "m/b/two", "r")
    ] or found[0] == "m"
    ends = [name.rpartition("/")[2] for name in found]
    assert [n for n in ends if n in {"d", "b", "one", "two", "r"}] == [
        *("d", "b", "one", "two", "r")
    ]


def test_layers_of_keras_are_whole():
    attention = kl.MultiHeadAttention(2, 2, name="attention")

    class Attends(kl.Layer):
        def call(self, x):
            return attention(x, x)

    attention.build((None, 3, 4), (None, 3, 4))
    model = traced([Attends(name="own")], tf.TensorSpec([None, 3, 4]))
    assert names(model) == ["own", "own/attention"]


@pytest.mark.parametrize(
    ("layer", "whole"),
    [
        (kl.Dense(2), True),
        (kl.LSTM(2), True),
        (kl.Bidirectional(kl.LSTM(2)), True),
        (kl.TimeDistributed(kl.Dense(2)), False),
        (keras.Sequential([kl.Dense(2)]), False),
        (Block(), False),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_whole_is_known_of_the_layer_alone(layer, whole):
    assert is_whole(layer) == whole


def test_operations_are_of_the_section_in_which_they_are_made():
    block = Block(name="b")
    block.build((None, 4))
    model = traced([block, kl.Lambda(tf.tanh, name="t")], SPEC)
    places = {op.type: i for i, op in enumerate(model.operations)}
    assert model.section_of(places["Tanh"]).name == "t"
    # Behind the calls inside: it goes with the last of them.
    assert model.section_of(places["Sin"]).name == "b/two"


def test_calls_in_branches_and_loops_begin_no_sections():
    dense = kl.Dense(4, name="inner")
    dense.build((None, 4))

    class Branches(kl.Layer):
        def call(self, x):
            x = tf.cond(tf.reduce_sum(x) > 0, lambda: dense(x), lambda: x)
            return tf.function(lambda x: dense(x))(x)

    model = traced([Branches(name="b"), kl.ReLU(name="r")], SPEC)
    assert names(model) == ["b", "r"]
