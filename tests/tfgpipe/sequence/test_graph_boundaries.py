"""Orders of a graph's calls, and what is alive between them."""

import keras
import numpy as np
from functional import Noise, normalized, residual
from keras import layers as kl

from tfgpipe.sequence.graph_calls import GraphCalls
from tfgpipe.sequence.model_graph import (
    GraphBoundaries,
    depth_first,
    in_turn,
)


def row_of(model):
    calls = GraphCalls(model)
    return GraphBoundaries(calls.inputs, calls.found, calls.outputs)


def branches():
    """Two branches of two layers, which Keras orders side by side."""
    x = keras.Input((4,))
    ends = [kl.Dense(8)(kl.Dense(3)(x)) for _ in range(2)]
    return keras.Model(x, kl.Add()(ends))


def test_what_a_later_call_needs_is_alive_until_then():
    x = keras.Input((4,), dtype="float32")
    first = kl.Dense(3)(x)
    h = kl.Dense(5)(first)
    row = row_of(keras.Model(x, kl.Concatenate()([h, first])))
    shapes = [[t.shape[1] for t in specs] for specs in row.specs]
    assert shapes == [[4], [3], [3, 5]]
    assert row.live_bytes == [16, 12, 32]


def test_step_hands_on_what_is_alive_and_computes_the_rest():
    x = keras.Input((4,))
    first = kl.Dense(3)(x)
    h = kl.Dense(5)(first)
    steps = row_of(keras.Model(x, kl.Concatenate()([h, first]))).steps()
    value = np.ones((2, 4), "float32")
    alive = steps[1](steps[0]([keras.ops.convert_to_tensor(value)], False), 0)
    assert [t.shape for t in alive] == [(2, 3), (2, 5)]
    assert steps[2](alive, False).shape == (2, 8)


def test_depth_first_ends_a_branch_before_the_next_begins():
    model = branches()
    calls = GraphCalls(model)
    widths = [
        call.outputs[0].spec.shape[1]
        for call in depth_first(calls.found, calls.outputs)
    ]
    assert widths == [3, 8, 3, 8, 8]


def can_turn(model, operation):
    """Whether calls of an operation may come the other way round."""
    calls = GraphCalls(model).found
    i, j = [i for i, c in enumerate(calls) if c.operation in operation]
    others = [*calls]
    others[i], others[j] = calls[j], calls[i]
    return in_turn(calls, others)


def test_calls_that_depend_on_earlier_ones_of_their_layer_are_in_turn():
    calls = GraphCalls(normalized()).found
    assert in_turn(calls, calls[::-1])
    x = keras.Input((5,))
    dropout, dense = kl.Dropout(0.5), kl.Dense(5)
    model = keras.Model(x, dropout(dense(dropout(dense(x)))))
    assert can_turn(model, [dense])
    assert not can_turn(model, [dropout])


def test_calls_that_use_what_others_assign_are_in_turn():
    x = keras.Input((4,))
    dense = kl.Dense(4)
    norm = kl.SpectralNormalization(dense)
    model = keras.Model(x, kl.Add()([dense(x), norm(x)]))
    assert not can_turn(model, [dense, norm])
    assert in_turn(*[GraphCalls(branches()).found] * 2)


class Counter(kl.Layer):
    """Counts calls in a list that others have, too."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def call(self, x):
        self.counts.append(1)
        return x / len(self.counts)


def test_calls_that_leave_something_in_python_are_in_turn():
    x = keras.Input((4,))
    counts = []
    first, second = Counter(counts), Counter(counts)
    model = keras.Model(x, kl.Add()([first(x), second(x)]))
    assert not can_turn(model, [first, second])


def test_no_cell_begins_between_calls_of_a_layer_with_state():
    assert row_of(residual()).together() == set()
    x = keras.Input((5,))
    norm = kl.BatchNormalization()
    h = kl.Dense(5)(norm(kl.Dense(5)(x)))
    row = row_of(keras.Model(x, kl.Dense(2)(norm(h))))
    assert row.together() == {2, 3}


def test_layers_that_share_a_generator_are_called_in_turn():
    x = keras.Input((5,))
    generator = keras.random.SeedGenerator(1)
    first, second = Noise(generator), Noise(generator)
    model = keras.Model(x, kl.Add()([second(kl.Dense(5)(x)), first(x)]))
    assert not can_turn(model, [first, second])


def test_layers_that_have_one_state_inside_are_in_one_cell():
    x = keras.Input((5,))
    norm = kl.BatchNormalization()
    first = keras.layers.TimeDistributed(norm)
    second = keras.layers.TimeDistributed(norm)
    h = kl.Reshape((1, 5))(kl.Dense(5)(x))
    h = second(kl.Dense(5)(first(h)))
    assert row_of(keras.Model(x, h)).together() == {3, 4}
