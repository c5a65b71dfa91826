"""Models that are made without the memory of their weights."""

import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe
from tfgpipe import internals

CPUS = ["CPU:1", "CPU:2"]


def functional():
    x = keras.Input((8,))
    h = kl.Dense(6, "relu")(x)
    h = kl.BatchNormalization()(h)
    h = kl.Dropout(0.5)(h)
    return keras.Model(x, kl.Add()([kl.Dense(6)(h), h]))


def sequential():
    return keras.Sequential([keras.Input((8,)), kl.Dense(6), kl.Dense(3)])


def layers():
    made = [keras.Input((8,)), kl.Dense(6), kl.LSTM(5), kl.Dense(3)]
    made[1].build((None, 8))
    return made[:2] + [kl.Reshape((6, 1))] + made[2:]


def drawing_together():
    """Initializers that draw from one generator, whatever the cells are."""
    draw = keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(4))
    sizes = [3, 9, 2, 8]
    return keras.Sequential(
        [keras.Input((8,)), *(kl.Dense(n, "relu", True, draw) for n in sizes)]
    )


def compiled():
    """Metrics and an optimizer have variables, too."""
    model = functional()
    model.compile("adam", "mse", metrics=[keras.metrics.AUC(), "mae"])
    return model


MADE = [functional, sequential, layers, drawing_together, compiled]


def made(make):
    keras.utils.set_random_seed(3)
    return make()


@pytest.mark.parametrize("make", MADE)
def test_variables_have_the_bits_of_keras_on_their_devices(make):
    plain = made(make)
    if isinstance(plain, list):
        plain = keras.Sequential(plain)
    with tfgpipe.deferred():
        model = made(make)
    built = model if isinstance(model, list) else model.layers
    trained = [w for layer in built[1:] for w in layer.trainable_weights]
    assert trained and not any(map(internals.is_created, trained))
    pipeline = tfgpipe.GPipe(model, 2, devices=CPUS)
    pairs = [*zip(plain.variables, pipeline.variables, strict=True)]
    for a, b in pairs[: len(plain.weights)]:
        np.testing.assert_array_equal(a, b.numpy())
    for cell, device in zip(pipeline.cells(), CPUS):
        own = [w for layer in cell.layers for w in named(pipeline, layer)]
        assert {w.value.device[-5:] for w in own} <= {device}


def named(model, name):
    return model.get_layer(name).weights


def test_cells_are_planned_before_there_is_memory():
    with tfgpipe.deferred():
        model = sequential()
    plan = tfgpipe.plan(model, 8, devices=2, machine="v100")
    assert sum(plan.device_bytes) > 0
    assert not any(map(internals.is_created, model.weights))


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(np.ones((2, 8))),
        lambda model: model.predict(np.ones((2, 8)), verbose=0),
        lambda model: model.get_weights(),
        lambda model: model.weights[0].assign(np.zeros((8, 6))),
        lambda model: model.layers[-1].quantize("int8"),
    ],
)
@pytest.mark.parametrize("is_inside", [True, False])
def test_use_before_the_pipeline_names_the_variable(use, is_inside):
    with tfgpipe.deferred():
        model = sequential()
        if is_inside:
            with pytest.raises(ValueError, match=r"dense.* has no value"):
                use(model)
    if not is_inside:
        with pytest.raises(ValueError, match=r"dense.* has no value"):
            use(model)
    tfgpipe.GPipe(model, 2, devices=CPUS)
    use(model)


def test_files_load_into_a_deferred_model(tmp_path):
    plain = made(sequential)
    plain.save_weights(tmp_path / "plain.weights.h5")
    with tfgpipe.deferred():
        model = sequential()
    with pytest.raises(ValueError, match="GPipe"):
        model.load_weights(tmp_path / "plain.weights.h5")
    pipeline = tfgpipe.GPipe(model, 2, devices=CPUS)
    model.load_weights(tmp_path / "plain.weights.h5")
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    pipeline.save(tmp_path / "whole.keras")
    with tfgpipe.deferred():
        loaded = tfgpipe.load_model(tmp_path / "whole.keras")
    for a, b in zip(plain.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_training_goes_on_from_a_checkpoint(tmp_path):
    x, y = np.ones((4, 8)), np.ones((4, 3))

    def trained(model, **kwargs):
        pipeline = tfgpipe.GPipe(model, 2, 2, devices=CPUS)
        pipeline.compile("adam", "mse")
        if kwargs:
            tfgpipe.restore(pipeline, tmp_path)
        else:
            pipeline.fit(
                x,
                y,
                verbose=0,
                callbacks=[tfgpipe.callbacks.Checkpoint(tmp_path, every=1)],
            )
        return pipeline

    first = trained(made(sequential))
    with tfgpipe.deferred():
        model = sequential()
    second = trained(model, restored=True)
    for a, b in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_adapters_of_a_deferred_model_are_those_of_keras():
    def adapted():
        keras.utils.set_random_seed(3)
        model = sequential()
        model.layers[0].enable_lora(2)
        return model

    plain = adapted()
    with tfgpipe.deferred():
        model = adapted()
    tfgpipe.GPipe(model, 2, devices=CPUS)
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
        assert a.trainable == b.trainable


def test_model_made_inside_as_a_pipeline_has_values():
    with tfgpipe.deferred():
        pipeline = tfgpipe.GPipe(sequential(), 2, devices=CPUS)
        model = sequential()
    assert len(pipeline.get_weights()) == 4
    assert not internals.is_created(model.weights[0])
