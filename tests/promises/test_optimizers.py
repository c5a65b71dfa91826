"""Every optimizer of Keras, and every option of them, gives Keras's numbers."""

import keras
import pytest
from keras import layers as kl
from keras_versions import WITHOUT
from tiny import assert_close, compiled, data, pipeline, sequential, state


def two_layers():
    return [
        keras.Input((4,)),
        kl.Dense(3, "tanh", kernel_regularizer="l2"),
        kl.Dense(2),
    ]


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)


OPTIMIZERS = {
    name: getattr(keras.optimizers, name, None)
    for name in (
        "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon "
        "Nadam RMSprop SGD ScheduleFreeAdamW"
    ).split()
}
VARIANTS = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "weight_decay": lambda: keras.optimizers.Adam(0.1, weight_decay=0.1),
    "ema": lambda: keras.optimizers.SGD(
        0.1,
        momentum=0.9,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    ),
    "accumulation": lambda: keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=2
    ),
    "loss_scale_factor": lambda: keras.optimizers.SGD(
        0.1, loss_scale_factor=8.0
    ),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1),
        initial_scale=2.0**10,
        dynamic_growth_steps=2,
    ),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1, momentum=0.9),
            {".*bias": keras.optimizers.Adam(0.1)},
        )
    ),
    "schedule": lambda: keras.optimizers.SGD(schedule(), momentum=0.9),
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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", [*OPTIMIZERS, *VARIANTS])
def test_optimizer_gives_what_keras_gives(name):
    if name in WITHOUT:
        pytest.skip(f"Keras {keras.__version__} has no {name} that works")
    make = {**OPTIMIZERS, **VARIANTS}[name]
    found = three_steps(pipeline(two_layers, m=2), make())
    # Eager, which is faster; and a graph of Keras's forgets the initial values
    # of the slots of `ScheduleFreeAdamW`.
    expected = three_steps(sequential(two_layers), make(), run_eagerly=True)
    assert_close(found, expected)
