import keras
import numpy as np
import pytest
import tensorflow as tf
from crossing import sent_tensors, short
from keras import layers as kl
from sharing_layers import Logits

import tfgpipe
from tfgpipe.devices import names

WIDTH, ROWS = 16, 20


def dense(count=8, width=WIDTH):
    return [kl.Dense(width, activation="relu") for _ in range(count)]


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(keras.optimizers.Adam, marks=pytest.mark.slow),
        lambda: keras.optimizers.Adam(global_clipnorm=0.1),
        lambda: keras.optimizers.AdamW(clipnorm=0.1, use_ema=True),
        pytest.param(
            lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adam", "global_clipnorm", "adamw_clipnorm_ema", "momentum"],
)
def test_step_moves_boundary_tensors_and_scalars_only(optimizer):
    model = tfgpipe.GPipe(dense(), num_partitions=4, num_micro_batches=4)
    model.compile(optimizer(), "mse", metrics=["mae"])
    x = np.ones((ROWS, WIDTH), "float32")
    sent = sent_tensors(model, x, x)
    boundary = (ROWS // 4, WIDTH)
    crossing = [entry[:2] for entry in sent if entry[2] == boundary]
    for k in range(3):  # 4 micro-batches forward, and their gradients back
        assert crossing.count((f"CPU:{k}", f"CPU:{k + 1}")) == 4
        assert crossing.count((f"CPU:{k + 1}", f"CPU:{k}")) == 4
    others = [entry for entry in sent if entry[2] != boundary]
    labels = [e for e in others if e[2] == (ROWS, WIDTH)]
    assert [e[:2] for e in labels] == [("CPU:0", "CPU:3")]
    big = [e for e in others if e not in labels and np.prod(e[2]) > 1]
    assert big == []


def test_variables_and_slots_are_on_the_device_of_their_cell():
    model = tfgpipe.GPipe(dense(), num_partitions=4, num_micro_batches=2)
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((4, WIDTH)), np.ones((4, WIDTH)))
    where = {v.path: short(v.value.device) for v in model.variables}
    for cell in model.cells():
        for name in cell.layers:
            devices = {d for path, d in where.items() if f"/{name}/" in path}
            assert devices == {short(cell.device)}
    slots = {
        short(v.value.device)
        for v in model.optimizer.variables
        if v.shape == (WIDTH,)
    }
    assert slots == {short(cell.device) for cell in model.cells()}


def test_layers_built_elsewhere_are_moved_with_their_values():
    layers = dense(2)
    for layer in layers:
        layer.build((None, WIDTH))
    before = [layer.kernel.numpy() for layer in layers]
    assert layers[1].kernel.value.device.endswith("CPU:0")
    model = tfgpipe.GPipe(layers, 2, devices=["CPU:4", "CPU:5"])
    model.build((None, WIDTH))
    for layer, kernel, device in zip(layers, before, ("CPU:4", "CPU:5")):
        assert layer.kernel.value.device.endswith(device)
        np.testing.assert_array_equal(layer.kernel.numpy(), kernel)


def test_building_allocates_nothing_on_other_devices():
    """A model as big as all devices together fits: no detour over one."""
    created = []

    def creator(next_creator, **kwargs):
        variable = next_creator(**kwargs)
        created.append(short(variable.device))
        return variable

    model = tfgpipe.GPipe(dense(4), num_partitions=4)
    with tf.variable_creator_scope(creator):
        model.build((None, WIDTH))
    devices = [short(cell.device) for cell in model.cells()]
    assert sorted(created) == sorted(devices * 2)


def test_shared_variable_has_one_owner_and_one_update():
    embedding = kl.Embedding(9, 6)
    model = tfgpipe.GPipe(
        [embedding, kl.Dense(6), kl.Dense(6), Logits(embedding)], 4, 2
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    model.train_on_batch(np.ones((4, 3), "int32"), np.ones((4, 3), "int32"))
    assert len(model.trainable_variables) == 5
    owner = short(embedding.embeddings.value.device)
    assert owner == short(model.cells()[0].device)
    assert [c.num_params for c in model.cells()] == [54, 42, 42, 0]


def test_model_whose_layers_another_one_moved_is_refused():
    """It would train variables that are no longer those of its layers."""
    layers = [kl.Dense(2, name=f"d{i}") for i in range(4)]
    first = tfgpipe.GPipe([keras.Input((2,)), *layers], 2, name="first")
    first.compile("sgd", "mse")
    x = np.ones((4, 2))
    first.fit(x, x, verbose=0)
    same = tfgpipe.GPipe([keras.Input((2,)), *layers[:2]], 1, name="same")
    same.compile("sgd", "mse")
    for model in (first, same):  # one device each, the one they had
        model.train_on_batch(x, x)
    second = tfgpipe.GPipe([keras.Input((2,)), *layers], 4, name="second")
    second.compile("sgd", "mse")
    second.fit(x, x, verbose=0)
    match = "layers of model 'first'.*layer 'd1'.*'second' has moved"
    for use in (first.train_on_batch, first.fit, first.evaluate):
        with pytest.raises(ValueError, match=match):
            use(x, x)
    with pytest.raises(ValueError, match=match):
        first.predict(x)
    copy = keras.models.clone_model(second)
    copy.compile("sgd", "mse")
    for model in (second, copy):
        model.fit(x, x, verbose=0)


@pytest.mark.parametrize(
    "head", ["", "/", "/device:", "/job:localhost/replica:0/task:0/device:"]
)
def test_devices_have_many_names(head):
    assert short(names.resolve_device(f"{head}cpu:3")) == "/device:CPU:3"
    for name in ("CPU:99", "GPU:0", "CPU", "nonsense", 3, ""):
        assert names.resolve_device(name) is None
