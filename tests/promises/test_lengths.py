"""Mini-batches of many lengths: what is traced, compiled, and kept."""

import keras
import numpy as np
import pytest
from keras import layers as kl
from tiny import assert_close, compiled

import tfgpipe

LENGTHS = range(3, 53)


def layers():
    return [
        kl.Embedding(50, 8),
        kl.Dense(8, "tanh"),
        kl.GlobalAveragePooling1D(),
        kl.Dense(2),
    ]


def batch(length):
    rng = np.random.default_rng(length)
    return rng.integers(0, 50, (4, length)), rng.standard_normal((4, 2))


def pipeline(**kwargs):
    keras.utils.set_random_seed(3)
    return compiled(tfgpipe.GPipe(layers(), 2, 2), **kwargs)


def fitted(model):
    data = (batch(length) for length in LENGTHS)
    fit = {"steps_per_epoch": len(LENGTHS), "shuffle": False, "verbose": 0}
    return model.fit(data, **fit).history


def by_batches(model):
    return [model.train_on_batch(*batch(length)) for length in LENGTHS]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("train", "most"),
    # Once to build; then of the first length, and of any. What is of any length
    # is tried once more, if the first one was another.
    [(fitted, 3), pytest.param(by_batches, 4, marks=pytest.mark.slow)],
)
def test_fifty_lengths_are_traced_a_few_times(train, most, dense_calls):
    model = pipeline()
    found = train(model)
    traced = sum(layer is model.layers[1] for layer in dense_calls)
    assert traced <= most
    keras.utils.set_random_seed(3)
    plain = compiled(keras.Sequential(layers()))
    assert_close(found, train(plain))


def test_xla_says_what_to_pad():
    model = pipeline(jit_compile=True)
    data = (batch(length) for length in (3, 4))
    with pytest.warns(UserWarning, match="axis 1 may differ.*Pad it"):
        model.fit(data, steps_per_epoch=2, shuffle=False, verbose=0)
