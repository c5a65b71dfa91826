"""Which blocks of a model are equal, and follow one another."""

import keras
import pytest
from keras import layers as kl

import tfgpipe


class Block(kl.Layer):
    """A block of a transformer, as a user writes it."""

    def __init__(self, units, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.norm = kl.LayerNormalization()
        self.attention = kl.MultiHeadAttention(2, units // 2)
        self.wide = kl.Dense(2 * units, "gelu")
        self.narrow = kl.Dense(units)
        self.drop = kl.Dropout(rate)

    def call(self, x):
        x = x + self.attention(x, x)
        return x + self.drop(self.narrow(self.wide(self.norm(x))))


class Stack(keras.Model):
    """A model whose own call has the loop."""

    def __init__(self, count):
        super().__init__()
        self.first = kl.Dense(8)
        self.blocks = [Block(8) for _ in range(count)]
        self.last = kl.Dense(3)

    def call(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def listed(*units, rates=()):
    rates = rates or [0.0] * len(units)
    blocks = [Block(n, rate) for n, rate in zip(units, rates, strict=True)]
    return [keras.Input((4, 8)), kl.Dense(8), *blocks, kl.Dense(3)]


def functional(count):
    """Blocks of Keras's own layers, with a skip over each."""
    x = y = keras.Input((4, 8))
    for _ in range(count):
        y = kl.Add()([y, kl.Dense(8)(kl.LayerNormalization()(y))])
    return keras.Model(x, kl.Dense(3)(y))


def built(layers):
    model = tfgpipe.GPipe(layers, 1, 2)
    if not model.built:
        model.build((None, 4, 8))
    return model.built_for("a test").source


@pytest.mark.parametrize(
    "make",
    [lambda: listed(8, 8, 8), lambda: Stack(3)],
    ids=["list", "own_call"],
)
def test_blocks_of_a_user_are_repeated_as_a_whole(make):
    source = built(make())
    [run] = source.repeats
    blocks = [
        {s.section.around[-2].name for s in source.steps[a:b] if _depth(s) > 1}
        for a, b in zip(run.bounds(), run.bounds()[1:])
    ]
    assert run.num_blocks == 3
    assert [len(own) for own in blocks] == [1, 1, 1]


def _depth(step):
    return len(step.section.around)


def test_blocks_of_a_functional_model_begin_where_little_crosses():
    source = built(functional(4))
    [run] = source.repeats
    assert run.num_blocks == 4
    live = [source.live_bytes[i] for i in run.bounds()[1:-1]]
    assert {*live} == {min(source.live_bytes[run.start + 1 : run.stop])}


def test_wide_and_narrow_blocks_are_two_runs():
    runs = built([*listed(8, 8, 8)[:-1], kl.Dense(6), *listed(6, 6)[2:]])
    assert [run.num_blocks for run in runs.repeats] == [3, 2]


def test_blocks_that_differ_are_no_run():
    rates = (0.1, 0.2, 0.3)
    source = built(listed(8, 8, 8, rates=rates))
    assert not [run for run in source.repeats if run.num_operations > 30]
