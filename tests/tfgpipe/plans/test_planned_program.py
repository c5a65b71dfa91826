"""What a plan takes for the program of a step is what the engine runs."""

import itertools

import keras
import pytest
from keras import layers as kl
from keras import ops
from quick import quick

import tfgpipe
from tfgpipe.plans import MACHINES, Setting, sized
from tfgpipe.sequence.source import source_of


class ToIntegers(kl.Layer):
    """No gradient goes through whole numbers."""

    def call(self, x):
        return ops.cast(ops.abs(x) * 0 + 1, "int32")


class ArgMax(kl.Layer):
    def call(self, x):
        return ops.argmax(x, -1)


class Stop(kl.Layer):
    def call(self, x):
        return ops.stop_gradient(x)


def flat():
    return [kl.Dense(4), kl.Flatten(), kl.Reshape((2, 2)), kl.Dense(3)]


def integers():
    return [kl.Dense(4), ToIntegers(), kl.Embedding(9, 2), kl.Dense(2)]


def stopped():
    return [kl.Dense(4, "tanh"), kl.Flatten(), Stop(), kl.Dense(2)]


def frozen():
    return [kl.Dense(4, "tanh", trainable=False), kl.Dense(4), *flat()[:2]]


def without_weights():
    return [kl.Rescaling(2.0), kl.Activation("tanh"), *flat()[:2]]


def normalised():
    return [kl.LayerNormalization(), kl.Dense(4), kl.ReLU(), kl.Dropout(0.1)]


def graph():
    x = keras.Input((4,))
    h = kl.Dense(4, "relu")(x)
    e = kl.Embedding(5, 4)(ArgMax()(h))
    return keras.Model(x, kl.Dense(2)(kl.Add()([e, kl.Flatten()(h)])))


MODELS = [flat, integers, stopped, frozen, without_weights, normalised, graph]
CUTS = ([1, 1, 1, 1], [2, 1, 1], [1, 3], [3, 1])
CASES = list(itertools.product(MODELS, CUTS))


@pytest.mark.parametrize(
    ("make", "cut"),
    quick(CASES, CASES[::3]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planned_program_is_that_of_the_engine(make, cut):
    """Cells that keep nothing were planned to recompute; others had halves.

    Operation by operation, under a schedule that cuts backward tasks and one
    that does not.
    """

    def layers():
        return make() if make is graph else [keras.Input((4,)), *make()]

    model = sized(source_of(layers()), None, "sgd")
    cut = [*cut[:-1], len(model.sizes) - sum(cut[:-1])]
    work = model.by_flops(MACHINES["v100"], 2)
    for schedule, remat in (("zero_bubble", "always"), ("gpipe", "never")):
        model = tfgpipe.GPipe(
            layers(),
            len(cut),
            3,
            layers_per_cell=cut,
            schedule=schedule,
            remat=remat,
        )
        rules = (remat,) * len(cut)
        setting = Setting(1, len(cut), tuple(cut), 3, schedule, rules)
        assert setting.program(work).ops == model.program(6).ops
