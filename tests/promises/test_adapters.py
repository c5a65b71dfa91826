"""Fine-tuning: adapters, quantised weights and frozen layers."""

import itertools

import keras
import numpy as np
import pytest
from beside_keras import normal
from keras import layers as kl
from tiny import quickly

import tfgpipe
from tfgpipe import timeline

pytestmark = pytest.mark.usefixtures("float64")


def chain():
    return keras.Sequential(
        [
            keras.Input((4,)),
            kl.Dense(8, "tanh"),
            kl.Dense(8, "tanh", name="changed"),
            kl.Dense(8, "tanh"),
            kl.Dense(2),
        ]
    )


def functional():
    model = chain()
    return keras.Model(model.inputs, model.outputs)


CHANGES = {
    "lora": lambda layer: layer.enable_lora(2),
    "quantize": lambda layer: layer.quantize("int8"),
    "lora of quantized": lambda layer: [
        layer.quantize("int8"),
        layer.enable_lora(2),
    ],
    "freeze": lambda layer: setattr(layer, "trainable", False),
}


def fit(model):
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, **quickly(model, {"loss": "mse"}))
    history = model.fit(
        normal(4), normal(2), 4, epochs=2, shuffle=False, verbose=0
    )
    return history.history["loss"]


def changed(make, wrap, change, when):
    """Losses and weights of a model whose layer is changed at some time."""
    keras.utils.set_random_seed(1)
    model = make()
    layer = model.get_layer("changed")
    if when == "before":
        change(layer)
    model = wrap(model)
    losses = fit(model) if when == "after training" else []
    if when != "before":
        change(layer)
    return losses + fit(model), model


# Together they have each change, each time and each kind of model.
QUICK = [
    ("lora", "before", chain),
    ("lora", "after training", functional),
    ("quantize", "when built", chain),
    ("lora of quantized", "after training", chain),
    ("freeze", "after training", functional),
]
ALL = itertools.product(
    CHANGES, ["before", "when built", "after training"], [chain, functional]
)


@pytest.mark.parametrize(
    ("name", "when", "make"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in ALL
    ],
)
def test_changed_layers_train_as_in_keras(name, when, make):
    change = CHANGES[name]
    losses, model = changed(make, lambda m: m, change, when)
    found, pipeline = changed(
        make, lambda m: tfgpipe.GPipe(m, 3, 2), change, when
    )
    # Keras has the adapters in float32.
    bound = 1e-6 if "lora" in name else 1e-10
    np.testing.assert_allclose(found, losses, bound)
    assert len(pipeline.trainable_weights) == len(model.trainable_weights)
    assert len(pipeline.optimizer.variables) == len(model.optimizer.variables)
    for a, b in zip(pipeline.weights, model.weights, strict=True):
        np.testing.assert_allclose(a, b, bound, bound)
    home = {
        name: cell.device for cell in pipeline.cells() for name in cell.layers
    }
    layer = pipeline.get_layer("changed")
    for variable in layer.variables:
        assert variable.value.device.endswith(home["changed"][1:])


def test_cells_below_all_that_is_trained_run_no_backward_task():
    model = chain()
    for layer in model.layers[:2]:
        layer.trainable = False
    pipeline = tfgpipe.GPipe(model, 4, 2)
    pipeline.compile("sgd", "mse")
    events = timeline.measure(pipeline, normal(4)[:4], normal(2)[:4], None, 1)
    backward = {e.task.cell for e in events if e.task.kind == "backward"}
    assert backward == {2, 3}
    assert {e.task.cell for e in events if e.task.kind == "forward"} == {
        0,
        1,
        2,
        3,
    }
