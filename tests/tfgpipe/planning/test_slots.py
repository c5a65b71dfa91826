"""Slots that are counted are those that Keras makes."""

import keras
import numpy as np
import pytest

from tfgpipe import internals
from tfgpipe.planning.slots import slot_bytes_of

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
    ],
    ids=lambda o: o if isinstance(o, str) else type(o).__name__,
)
def test_slots_are_those_of_the_built_optimizer(optimizer):
    count = slot_bytes_of(optimizer)
    built = keras.optimizers.get(optimizer)
    variables = [keras.Variable("zeros", shape=s) for s in SHAPES]
    found = [count(v) for v in variables]
    assert not built.built
    built.build(variables)
    assert found == [
        sum(4 * int(np.prod(s.shape)) for s in internals.slots(built, v))
        for v in variables
    ]
