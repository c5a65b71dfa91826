"""What a model reads and assigns while it runs in a graph."""

import keras
import pytest
import tensorflow as tf
from keras import layers as kl
from traces import traced

SPEC = tf.TensorSpec([None, 4])


class Weighted(kl.Layer):
    """Calls a function of its inputs, a weight and a variable beside."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.w = self.add_weight((4,), "ones", name="w")
        self.kept = self.add_weight((4,), trainable=False, name="kept")

    def call(self, x):
        return self.function(self, x)


def test_weight_is_read_by_each_section_and_other_variables_once():
    layer = Weighted(lambda self, x: x * self.w + self.w + self.kept)
    model = traced([layer, layer], SPEC)
    assert [use.variable for use in model.uses] == [layer.w, layer.w]
    first, second = (use.section for use in model.uses)
    assert first < second
    assert [variable for variable, _ in model.state] == [layer.kept]
    assert model.new_state == []


def test_nothing_is_captured_or_changed_by_a_run():
    layer = Weighted(
        lambda self, x: [x * self.w, self.kept.assign_add(self.w)][0]
    )
    before = layer.kept.numpy()
    model = traced([layer], SPEC)
    assert not model.graph.captures
    ((variable, new),) = model.new_state
    assert variable is layer.kept
    assert new.shape == (4,)
    assert (layer.kept.numpy() == before).all()


def test_variables_of_others_are_read_as_those_of_the_model():
    """As of a layer in a closure: Keras tracks it not, and trains it not."""
    other = Weighted(lambda self, x: x)
    model = traced([kl.Lambda(lambda x: x * other.w + other.kept)], SPEC)
    assert model.uses == []
    assert {id(v) for v, _ in model.state} == {id(other.w), id(other.kept)}


def test_frozen_weight_is_no_use():
    layer = Weighted(lambda self, x: x * self.w, trainable=False)
    model = traced([layer], SPEC)
    assert model.uses == []
    assert [variable for variable, _ in model.state] == [layer.w]


def test_new_value_of_a_weight_is_read_after_it_is_assigned():
    def doubled(self, x):
        self.w.assign(2.0 * self.w)
        return x * self.w

    layer = Weighted(doubled)
    model = traced([layer, kl.Lambda(lambda x: x + layer.w)], SPEC)
    ((variable, new),) = model.new_state
    assert variable is layer.w
    assert len(model.uses) == 2
    reached, waiting = set(), [model.outputs[0].op]
    while waiting:
        op = waiting.pop()
        if op.name not in reached:
            reached.add(op.name)
            waiting += [t.op for t in op.inputs]
    assert new.op.name in reached
    assert (
        model.uses[1].tensor.op.name in reached
    )  # its gradient is the weight's


@pytest.mark.parametrize("is_split", [False, True])
def test_seed_that_is_drawn_unordered_is_noted_or_refused(is_split):
    generator = keras.random.SeedGenerator(1)
    draw = kl.Lambda(lambda x: [x, generator.next(ordered=False)][0])
    if is_split:
        with pytest.raises(ValueError, match="draw"):
            traced([draw], SPEC, is_split=True)
        return
    model = traced([draw], SPEC)
    assert model.draws == {id(generator.state): None}


def test_draws_of_a_generator_that_no_layer_lists_are_counted():
    generator = keras.random.SeedGenerator(1)
    draw = kl.Lambda(lambda x: [x, generator.next()][0])
    model = traced([draw, draw], SPEC, is_split=True)
    assert model.draws == {id(generator.state): 2}
