"""Every optimizer of Keras, and every option of them, gives Keras's numbers."""

import keras
import numpy as np
import own_optimizers
import pytest
import tensorflow as tf
from keras import layers as kl
from keras_versions import WITHOUT
from quick import quick
from tiny import assert_close, compiled, data, pipeline, sequential, state

import tfgpipe


def three_layers():
    """Two of them have weights of the same shapes: their updates are shared."""
    return [
        keras.Input((4,)),
        kl.Dense(4, "tanh", kernel_regularizer="l2"),
        kl.Dense(4),
        kl.Dense(2),
    ]


class Assigning(keras.optimizers.schedules.LearningRateSchedule):
    """Keeps the rate in a variable."""

    def __init__(self):
        self.rate = keras.Variable(0.5)

    def __call__(self, step):
        self.rate.assign(1 / (tf.cast(step, self.rate.dtype) + 2))
        return self.rate


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)


OPTIMIZERS = {
    name: getattr(keras.optimizers, name, None)
    for name in (
        "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon "
        "Nadam RMSprop SGD ScheduleFreeAdamW"
    ).split()
}


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.1, **options)


def adam(*rate, **options):
    return lambda: keras.optimizers.Adam(*(rate or (0.1,)), **options)


EMA = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
VARIANTS = {
    "clipnorm": sgd(clipnorm=0.1),
    "clipvalue": sgd(clipvalue=0.05),
    "global_clipnorm": sgd(global_clipnorm=0.1),
    "weight_decay": adam(weight_decay=0.1),
    "ema": sgd(momentum=0.9, **EMA),
    "accumulation": adam(gradient_accumulation_steps=2),
    "loss_scale_factor": sgd(loss_scale_factor=8.0),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        adam()(), initial_scale=2.0**10, dynamic_growth_steps=2
    ),
    "MultiOptimizer": own_optimizers.multiple,
    "schedule": lambda: keras.optimizers.SGD(schedule(), momentum=0.9),
    "rate_in_a_variable": lambda: keras.optimizers.Adam(Assigning()),
}


def test_every_keras_optimizer_is_in_these_tests():
    classes = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and value is not keras.optimizers.Optimizer
    }
    assert classes <= {*OPTIMIZERS, *VARIANTS}


def three_steps(model, optimizer, **kwargs):
    compiled(model, optimizer, **kwargs)
    x, y = data(6)
    logs = [model.train_on_batch(x, y) for _ in range(3)]
    return logs, state(model)


# They do with each weight what Adam and SGD do, by another formula.
ALIKE = {
    *"Adadelta Adagrad Adamax AdamW Ftrl Nadam RMSprop".split(),
    *"clipvalue loss_scale_factor".split(),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "name", quick([*OPTIMIZERS, *VARIANTS], {*OPTIMIZERS, *VARIANTS} - ALIKE)
)
def test_optimizer_gives_what_keras_gives(name):
    if name in WITHOUT:
        pytest.skip(f"Keras {keras.__version__} has no {name} that works")
    make = {**OPTIMIZERS, **VARIANTS}[name]
    found = three_steps(pipeline(three_layers, m=2), make())
    # Eager, which is faster; and a graph of Keras's forgets the initial values
    # of the slots of `ScheduleFreeAdamW`.
    expected = three_steps(sequential(three_layers), make(), run_eagerly=True)
    assert_close(found, expected)


@pytest.mark.usefixtures("float64", "as_written")
@pytest.mark.parametrize("name", ["Adafactor", "Ftrl", "RMSprop"])
def test_update_has_the_bits_of_keras_without_the_graph_optimiser(name):
    """These divide by roots and powers, which it computes otherwise."""
    make = OPTIMIZERS[name]
    found = three_steps(pipeline(three_layers, m=1), make())
    expected = three_steps(sequential(three_layers), make(), jit_compile=False)
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["Adam", "LossScaleOptimizer"])
def test_update_of_bfloat16_weights_is_that_of_keras(name):
    """Keras casts where the optimizer's slots have another precision."""

    def layers():
        return [keras.Input((4,)), *(kl.Dense(n) for n in (4, 4, 2))]

    keras.config.set_dtype_policy("bfloat16")
    make = {**OPTIMIZERS, **VARIANTS}[name]
    found = three_steps(pipeline(layers, m=1), make())
    expected = three_steps(sequential(layers), make(), run_eagerly=True)
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected)):
        a, b = (np.asarray(numbers, "float32") for numbers in (a, b))
        np.testing.assert_allclose(a, b, 2e-2, 1e-2)


class Range(kl.Layer):
    """Divides by the largest value of the last mini-batch, as float8 does."""

    def build(self, shape):
        self.top = self.add_weight(
            (), initializer="ones", overwrite_with_gradient=True
        )

    def call(self, x):
        @tf.custom_gradient
        def scaled(x, top):
            y = tf.tanh(x / top)

            def gradient(dy):
                return dy * (1 - y * y) / top, tf.reduce_max(tf.abs(x))

            return y, gradient

        return scaled(x, tf.convert_to_tensor(self.top))


def ranges():
    return [
        keras.Input((4,)),
        kl.Dense(5, "tanh"),
        Range(),
        kl.Dense(5, kernel_regularizer="l2"),
        Range(),
        kl.Dense(2),
    ]


class ByHand(keras.optimizers.SGD):
    """Calls the updates itself."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        for rate in (0.1, 0.05):
            for gradient, variable in zip(grads, trainable_variables):
                self.update_step(gradient, variable.value, rate)
            self.iterations.assign_add(1)


class InDictionary(keras.optimizers.SGD):
    """Keeps its slots in a dictionary."""

    def build(self, variables):
        super().build(variables)
        self.momentums = dict(enumerate(self.momentums))


OWN = {
    "InDictionary": lambda: InDictionary(0.1, momentum=0.9),
    "Twice": lambda: own_optimizers.Twice(0.05),
    "ByHand": lambda: ByHand(0.1, momentum=0.9),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", OWN)
def test_optimizer_that_applies_in_its_own_way_gives_what_keras_gives(name):
    found = three_steps(pipeline(three_layers, m=2), OWN[name]())
    model = sequential(three_layers)
    expected = three_steps(model, OWN[name](), run_eagerly=True)
    assert_close(found, expected)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "replicas", "m"),
    quick(
        [
            ("Adam", 1, 4),
            ("Adam", 2, 2),
            ("accumulation", 1, 4),
            ("Twice", 1, 4),
        ],
        [("Adam", 2, 2)],
    ),
)
def test_weights_overwritten_with_gradients_are_those_of_keras(
    name, replicas, m
):
    make = {**OPTIMIZERS, **VARIANTS, **OWN}[name]
    with tfgpipe.PipelineStrategy(replicas, 2).scope():
        model = pipeline(ranges, m=m)
        found = three_steps(model, make())
    expected = three_steps(sequential(ranges), make(), run_eagerly=True)
    assert_close(found, expected)


def test_float8_scales_are_those_of_the_whole_mini_batch():
    def trained(model):
        for layer in model.layers[-2:]:
            layer.quantize("float8")
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = data(6)
        model.train_on_batch(x, y)
        model.train_on_batch(x, y)
        scales = [v for v in model.variables if v.overwrite_with_gradient]
        assert len(scales) == 12
        return [v.numpy() for v in scales]

    expected = trained(sequential(three_layers))
    assert_close(trained(pipeline(three_layers, m=4)), expected, 1e-5)
