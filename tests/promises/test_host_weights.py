"""Weights on the host: the bits of a pipeline that has them on its devices."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from crossing import sent_tensors
from device_names import names
from graphs import step_graph
from keras import layers as kl

import tfgpipe
from tfgpipe.devices.names import same_device

HOST = "CPU:0"


def compiled(weights_on="host", schedule="breadth_first", chunks=3, **kwargs):
    """Two devices, of which none is the host."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,))]
    layers += [kl.Dense(8, "tanh", name=f"d{i}") for i in range(2 * chunks)]
    model = tfgpipe.GPipe(
        [*layers, kl.BatchNormalization()],
        2 * chunks,
        4,
        devices=names(3)[1:],
        schedule=schedule,
        weights_on=weights_on,
        **kwargs,
    )
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse")
    return model


def data(rows=12):
    x = np.random.default_rng(0).standard_normal((rows, 8)).astype("float32")
    return x, x[:, ::-1].copy()


def test_weights_and_slots_are_on_the_host_and_nothing_else():
    model = compiled()
    model.fit(*data(), verbose=0)
    slots = [v for v in model.optimizer.variables if len(v.shape)]
    assert len(slots) == 2 * len(model.trainable_variables)
    for variable in (*model.trainable_variables, *slots):
        assert same_device(variable.value.device, HOST)
    for variable in model.non_trainable_variables:
        assert not same_device(variable.value.device, HOST)


@pytest.mark.parametrize("name", [HOST, names(3)[2]])
def test_weights_may_be_on_any_device(name):
    model = compiled(name)
    model.fit(*data(), verbose=0)
    for variable in model.trainable_variables:
        assert same_device(variable.value.device, name)


def test_training_goes_on_elsewhere(tmp_path):
    """From the host to the devices, by a file; and by `evaluate` and others."""
    plain, model = compiled("devices"), compiled("host")
    for one in (plain, model):
        one.fit(*data(), verbose=0)
    model.save(tmp_path / "model.keras")
    same = tfgpipe.load_model(tmp_path / "model.keras")
    other = tfgpipe.load_model(tmp_path / "model.keras", weights_on="devices")
    assert same_device(same.trainable_variables[0].value.device, HOST)
    assert not same_device(other.trainable_variables[0].value.device, HOST)
    for one in (plain, model, same, other):
        one.fit(*data(), verbose=0)
        np.testing.assert_array_equal(
            one.evaluate(*data(7), verbose=0),
            plain.evaluate(*data(7), verbose=0),
        )
        np.testing.assert_array_equal(
            one.predict(data(7)[0], verbose=0),
            plain.predict(data(7)[0], verbose=0),
        )


def adapted(**kwargs):
    """Layers with LoRA, one that is frozen as a whole, and what is assigned."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            *(kl.Dense(8, "tanh", name=f"d{i}") for i in range(4)),
            kl.SpectralNormalization(kl.Dense(8), name="spectral"),
            kl.BatchNormalization(name="norm"),
        ]
    )
    for layer in model.layers[:3]:
        layer.enable_lora(2)
    for name in ("d3", "spectral", "norm"):
        model.get_layer(name).trainable = False
    if kwargs:
        model = tfgpipe.GPipe(
            model,
            4,
            3,
            devices=names(3)[1:],
            schedule="breadth_first",
            **kwargs,
        )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_frozen_weights_are_sent_as_others_are():
    found = []
    models = [adapted(weights_on="devices"), adapted(weights_on="host")]
    for model in models:
        model.fit(*data(), 6, 2, shuffle=False, verbose=0)
        model.get_layer("d3").trainable = True  # and they may be trained again
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(*data(), 6, 2, shuffle=False, verbose=0)
        found.append(
            [*model.get_weights(), model.predict(data(7)[0], verbose=0)]
        )
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    for layer in models[1].layers:
        for v in layer.weights:
            is_state = "vector_u" in v.path or "moving" in v.path
            assert same_device(v.value.device, HOST) != is_state


def test_frozen_weights_may_be_read_where_a_gradient_is_the_users():
    class Again(kl.Dense):
        def call(self, x):
            return tf.recompute_grad(lambda x: tf.tanh(x @ self.kernel))(x)

    found = []
    for weights_on in ("devices", "host"):
        keras.utils.set_random_seed(3)
        layers = [keras.Input((8,)), kl.Dense(8), Again(8), kl.Dense(8)]
        layers[2].trainable = False
        model = tfgpipe.GPipe(
            layers, 2, 3, devices=names(3)[1:], weights_on=weights_on
        )
        model.compile("sgd", "mse")
        model.fit(*data(), verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        # The last two cells of a device stay there from pass to pass.
        ("breadth_first", {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}),
        ("gpipe", {0: 1, 1: 1}),
    ],
)
def test_weights_are_sent_when_a_device_comes_to_their_cell(schedule, most):
    model = compiled(schedule=schedule, chunks=len(most) // 2)
    graph = step_graph(model, *data())
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    storages = {id(t): name for t, name in _captured(graph, model)}
    counts = collections.Counter(storages.get(id(op.inputs[0])) for op in reads)
    for k, count in most.items():
        assert counts[f"d{k}/kernel"] == count
    waiting = [
        op
        for op in reads
        if storages.get(id(op.inputs[0])) == "d0/kernel"
        and any("Call" in before.type for before in op.control_inputs)
    ]
    assert len(waiting) == most[0] - 1  # for the task before the last one


def _captured(graph, model):
    """The handles of weights inside a graph, with their names."""
    paths = {id(v.value.handle): v.path for v in model.trainable_variables}
    return [
        (inner, "/".join(paths[id(outer)].split("/")[-2:]))
        for outer, inner in graph.captures
        if id(outer) in paths
    ]


WORDS, ROWS = 500, 8


def with_table(make=keras.Sequential, **kwargs):
    """A table beside layers that are small."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((6,), dtype="int32"),
        kl.Embedding(WORDS, 4),
        kl.Flatten(),
        kl.Dense(8, "tanh"),
        kl.Dense(2),
    ]
    return make(layers, **kwargs)


def on_host(**kwargs):
    cells = {"devices": names(3), "layers_per_cell": [1, 2, 1]}
    return with_table(tfgpipe.GPipe, num_partitions=3, **cells, **kwargs)


def words():
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (3 * ROWS, 6)).astype("int32")
    return x, rng.normal(size=(3 * ROWS, 2)).astype(keras.config.floatx())


@pytest.mark.parametrize("m", [1, 2])
def test_rows_of_a_table_on_the_host_cross_and_its_gradient_is_sparse(m):
    model, applied = on_host(num_micro_batches=m), []
    model.compile(keras.optimizers.Adam(0.01), "mse")
    apply = model.optimizer.apply_gradients

    def noting(pairs):
        applied.extend(pairs)
        apply(pairs)

    model.optimizer.apply_gradients = noting
    x, y = (array[:ROWS] for array in words())
    sent = sent_tensors(model, x, y)
    slices, table = applied[0]
    assert isinstance(slices, tf.IndexedSlices)
    assert slices.values.shape == (ROWS * 6, 4)
    slots = [v for v in model.optimizer.variables if v.shape == table.shape]
    assert len(slots) == 2
    for variable in (table, *slots):
        assert same_device(variable.value.device, HOST)
    # Forward the rows that are looked up, and back their gradients.
    crossing = [
        shape
        for source, target, shape, _ in sent
        if HOST in (source, target) and np.prod(shape) > 2 * ROWS
    ]
    assert crossing == [(ROWS // m, 6, 4)] * 2 * m
