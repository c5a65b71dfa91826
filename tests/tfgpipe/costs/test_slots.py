"""Slots that are counted are those that Keras makes."""

import keras
import numpy as np
import pytest

from tfgpipe import internals
from tfgpipe.costs.layer_size import slot_bytes_of

SHAPES = [(), (4,), (6, 5), (3, 3, 8, 16)]


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        keras.optimizers.SGD(momentum=0.9),
        "adam",
        keras.optimizers.Adam(amsgrad=True),
        keras.optimizers.RMSprop(momentum=0.9, centered=True),
        "adafactor",
        "ftrl",
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    ],
    ids=lambda o: o if isinstance(o, str) else type(o).__name__,
)
def test_slots_are_those_of_the_built_optimizer(optimizer):
    count = slot_bytes_of(optimizer)
    built = keras.optimizers.get(optimizer)
    inner = getattr(built, "inner_optimizer", built)
    variables = [keras.Variable("zeros", shape=s) for s in SHAPES]
    found = [count(v) for v in variables]
    assert not built.built
    built.build(variables)
    assert found == [
        sum(4 * int(np.prod(s.shape)) for s in internals.slots(inner, v))
        for v in variables
    ]


def test_no_optimizer_has_no_slots():
    assert slot_bytes_of(None)(keras.Variable("zeros", shape=(3,))) == 0


def test_optimizer_that_cannot_be_made_again_is_named():
    class Odd(keras.optimizers.SGD):
        def __init__(self, what):
            super().__init__(0.1)

    with pytest.raises(ValueError, match=r"`optimizer` must be.*get_config"):
        slot_bytes_of(Odd(3))
