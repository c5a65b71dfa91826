"""The strategy: its arguments, its scope, and Keras under it."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from crossing import short
from keras import layers as kl
from replicated import refused, replicas
from tiny import assert_close, data, fit, layers, random_layers, weights

import tfgpipe


# ----------------------------------------------------------------- arguments
def test_devices_are_the_first_in_order_a_replica_after_the_other():
    strategy = tfgpipe.PipelineStrategy(2, 3)
    found = [[short(d) for d in own] for own in strategy.devices]
    assert found == [
        ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"],
        ["/device:CPU:3", "/device:CPU:4", "/device:CPU:5"],
    ]
    assert (strategy.num_replicas, strategy.num_partitions) == (2, 3)
    assert repr(strategy) == (
        "<PipelineStrategy num_replicas=2 num_partitions=3>"
    )


def test_strategy_is_one_of_tensorflow_with_one_replica_for_it():
    strategy = tfgpipe.PipelineStrategy(2, 2)
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        model = tfgpipe.GPipe(layers())
    assert model.distribute_strategy is strategy
    assert (model.num_replicas, model.num_partitions) == (2, 2)
    assert tfgpipe.GPipe(layers(), 2).num_replicas == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((0, 2), ("`num_replicas` must be an integer", "num_replicas=0")),
        ((2, 1.5), ("`num_partitions` must be", "num_partitions=1.5")),
        ((True, "2"), ("num_replicas=True", "num_partitions='2'")),
        (
            (3, 3),
            (
                "`num_replicas` times `num_partitions`, 3 times 3. Received: 8",
                "set_logical_device_configuration",
            ),
        ),
        (
            (2, 1, ["CPU:0", "CPU:0"]),
            ("must be different devices", "'CPU:0', 'CPU:0'"),
        ),
        ((2, 1, ["CPU:0", "GPU:7"]), ("that TensorFlow lists", "'GPU:7'")),
        (
            (2, 2, ["CPU:0", "CPU:1", "CPU:2"]),
            ("2 times 2. Received: 3, ",),
        ),
        ((2, 2, "CPU:0"), ("must be different devices", "'C', 'P', 'U'")),
    ],
)
def test_bad_arguments_of_the_strategy_are_refused(arguments, parts):
    with refused(*parts):
        tfgpipe.PipelineStrategy(*arguments)


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        (
            {"num_partitions": 3},
            ("must go with the devices: .* 3 cells take 3", "Leave it out"),
        ),
        (
            {"num_partitions": 1},
            ("must go with the devices: .* 1 cells take 1", "Leave it out"),
        ),
        (
            {"num_partitions": 3, "schedule": "interleaved"},
            ("a multiple of 2 .* on 2 devices", "num_partitions=3"),
        ),
        (
            {"devices": ["CPU:4", "CPU:5"]},
            (
                "must be left out in the scope of a strategy",
                r"devices=\['CPU:4', 'CPU:5'\]",
            ),
        ),
        (
            {"schedule": [[("forward", 0, 0), ("backward", 0, 0)]]},
            ("under this schedule 1 cells take 1",),
        ),
    ],
)
def test_arguments_that_contradict_the_strategy_are_refused(kwargs, parts):
    with tfgpipe.PipelineStrategy(2, 2).scope(), refused(*parts):
        tfgpipe.GPipe(layers(), **kwargs)


def test_more_devices_than_layers_are_refused():
    with refused("at most the number of layers, 3", "num_partitions=4"):
        replicas(layers(), 2, 4)


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        (
            kl.BatchNormalization(renorm=True),
            ("renorm=True", "num_micro_batches=1 without replicas"),
        ),
        (
            kl.BatchNormalization(synchronized=True),
            ("synchronized=True", "Pass synchronized=False"),
        ),
    ],
)
def test_normalisation_over_replicas_is_refused(layer, parts):
    with refused(*parts):
        replicas([layer], 2, 1)
    replicas([type(layer).from_config(layer.get_config())], 1, 1)


def mirrored(count=4):
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


LINE = r"`tfgpipe\.PipelineStrategy\.from_strategy\(strategy, num_part"


def test_other_strategies_are_refused_with_what_to_type():
    with mirrored().scope(), refused("Received: the scope of", LINE):
        tfgpipe.GPipe(layers(), num_partitions=2)


def test_model_made_elsewhere_is_refused_in_a_scope():
    strategy = tfgpipe.PipelineStrategy(2, 2)
    x, y = data()
    for make in (
        lambda: tfgpipe.GPipe(layers(), 2),
        lambda: replicas(layers(), 2, 2),
    ):
        model = make()
        model.compile("sgd", "mse")
        with strategy.scope():
            with refused("in the scope in", "a model made in", "Leave"):
                model.evaluate(x, y, verbose=0)
            with refused("in the scope in which it was made"):
                model.fit(x, y, verbose=0)


@pytest.mark.parametrize("step", ["fit", "evaluate", "predict"])
def test_use_in_the_scope_of_another_strategy_is_refused(step):
    model = tfgpipe.GPipe(layers(), 1)
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = data(4)
    arguments = [x] if step == "predict" else [x, y]
    getattr(model, step)(*arguments, verbose=0)  # as advised
    with (
        tf.distribute.MirroredStrategy(["CPU:0"]).scope(),
        refused(
            "must be used in the scope",
            "MirroredStrategy",
            "made in no scope",
            "do without the strategy's `run`",
            LINE,
        ),
    ):
        getattr(model, step)(*arguments, verbose=0)


@pytest.mark.parametrize("step", ["train_step", "test_step", "predict_step"])
@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
def test_step_that_another_strategy_runs_is_refused(step, devices):
    model = tfgpipe.GPipe(layers(), 1)
    model.compile("sgd", "mse")
    strategy = tf.distribute.MirroredStrategy(devices)
    with refused("MirroredStrategy", "do without the strategy's `run`"):
        strategy.run(getattr(model, step), args=(data(4),))
    assert model.optimizer.iterations == 0


def test_devices_of_a_mirrored_strategy_become_those_of_replicas():
    class Own(tfgpipe.PipelineStrategy):
        pass

    strategy = Own.from_strategy(mirrored(), num_partitions=2)
    assert type(strategy) is Own
    found = [[short(d)[-1] for d in own] for own in strategy.devices]
    assert found == [["0", "1"], ["2", "3"]]
    one = tf.distribute.OneDeviceStrategy("CPU:5")
    strategy = tfgpipe.PipelineStrategy.from_strategy(one, 1)
    assert [short(d) for d in strategy.devices[0]] == ["/device:CPU:5"]


@pytest.mark.parametrize(
    ("strategy", "k", "parts"),
    [
        (
            mirrored,
            3,
            ("`num_partitions` divides", "CPU:3", "num_partitions=3"),
        ),
        (mirrored, 8, ("num_partitions=8", "Or name `devices`")),
        (mirrored, 0, ("`num_partitions` must be an integer",)),
        (
            tf.distribute.experimental.CentralStorageStrategy,
            1,
            ("`tf.distribute.MirroredStrategy`", "CentralStorageStrategy"),
        ),
        (lambda: None, 1, ("Received: None", "Or name `devices`")),
    ],
)
def test_strategies_without_fitting_devices_are_refused(strategy, k, parts):
    with refused(*parts):
        tfgpipe.PipelineStrategy.from_strategy(strategy(), k)


def test_model_made_under_a_mirrored_strategy_is_trained_in_replicas():
    """Its variables, a copy for each device, become ordinary ones."""
    theirs = mirrored(2)
    with theirs.scope():
        model = keras.Sequential(random_layers())
    assert isinstance(model.weights[0].value, tf.distribute.DistributedValues)
    before = weights(model)
    with tfgpipe.PipelineStrategy.from_strategy(theirs, 2).scope():
        pipeline = tfgpipe.GPipe(model, num_micro_batches=2)
        pipeline.compile("adam", "mse")
    assert_close(weights(pipeline), before)
    fit(pipeline, *data())
    for variable in pipeline.variables:
        assert isinstance(variable.value, tf.Variable)
        assert not isinstance(variable.value, tf.distribute.DistributedValues)
    assert not np.allclose(weights(pipeline)[0], before[0])
    x, _ = data()
    assert_close(model(x).numpy(), pipeline.predict(x, verbose=0), 1e-5)


# --------------------------------------------------------------------- cells
def test_cells_tell_the_devices_of_all_replicas(capsys):
    devices = ["CPU:5", "CPU:4", "CPU:3", "CPU:2"]
    model = replicas(layers(), 2, 2, devices=devices)
    cells = model.cells()
    assert [short(cell.device)[-1] for cell in cells] == ["5", "4"]
    found = [[short(d)[-1] for d in cell.devices] for cell in cells]
    assert found == [["5", "3"], ["4", "2"]]
    model.summary()
    assert "/device:CPU:4 /device:CPU:2" in capsys.readouterr().out


# ------------------------------------------------------------- Keras under it
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "inside", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_fit_inside_and_outside_of_the_scope(inside):
    """Also with an optimizer and metrics that were made elsewhere."""
    strategy = tfgpipe.PipelineStrategy(2, 2)
    scopes = strategy.scope, contextlib.nullcontext
    x, y = data()

    def trained(model, scope, elsewhere):
        with elsewhere():
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
        swap = [] if inside else [keras.callbacks.SwapEMAWeights(True)]
        with scope():
            model.compile(optimizer, "mse", metrics=["mae"])
            logs = fit(model, x, y, validation_data=(x, y), callbacks=swap)
            return logs, weights(model), model.predict(x, verbose=0)

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = tfgpipe.GPipe(layers(), num_micro_batches=2)
    found = trained(model, *scopes[:: 1 if inside else -1])
    keras.utils.set_random_seed(5)
    plain = trained(keras.Sequential(layers()), *[contextlib.nullcontext] * 2)
    assert_close(found, plain)


def test_overflow_in_the_last_replica_skips_the_step():
    keras.config.set_dtype_policy("mixed_float16")
    model = replicas([keras.Input((4,)), kl.Dense(3), kl.Dense(2)], 2, 2)
    model.compile("sgd", "mse")
    x, y = data(4)
    model.train_on_batch(x, y)
    before, scale = weights(model), model.optimizer.dynamic_scale.numpy()
    x[3] = 6e4  # in half precision the sum is infinite
    model.train_on_batch(x, y)
    for a, b in zip(weights(model), before):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.dynamic_scale.numpy() == scale / 2
