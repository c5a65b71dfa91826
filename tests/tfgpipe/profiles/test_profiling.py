"""What `tfgpipe.profile` measures, and what it leaves as it was."""

import random

import keras
import numpy as np
import own_call
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe import internals
from tfgpipe.devices import names
from tfgpipe.profiles import MEASURED

ONES = np.ones((8, 4), "float32")


def profile(layers, x=ONES, *args, **kwargs):
    rows = [len(x)] if hasattr(x, "shape") else None
    options = {"seconds": 1e-3, "verbose": 0, "micro_batch_sizes": rows}
    options |= kwargs
    return tfgpipe.profile(layers, x, *args, **options)


def test_record_of_a_list_by_hand():
    layers = [
        keras.Input((4,)),
        kl.ReLU(name="a"),
        kl.Dense(4, "relu", name="b"),
        kl.Dense(4, "relu", name="c"),
        kl.Dense(4, "relu", name="d"),
        kl.Dense(2, trainable=False, name="e"),
    ]
    found = profile(layers, micro_batch_sizes=[8, 2])
    assert [layer.name for layer in found.layers] == ["a", "b", "c", "d", "e"]
    assert found.rows == (2, 8)
    assert [layer.weight_bytes for layer in found.layers] == [0, 80, 80, 80, 40]
    assert [layer.slot_bytes for layer in found.layers] == [0, 160, 160, 160, 0]
    grads = [layer.gradient_bytes for layer in found.layers]
    assert grads == [0, 80, 80, 80, 0]
    assert [layer.num_params for layer in found.layers] == [0, 20, 20, 20, 0]
    a, b, c, d, e = (layer.measured[-1] for layer in found.layers)
    outputs = [own.output_bytes for own in (a, b, c, d, e)]
    assert outputs == [128, 128, 128, 128, 64]
    # ReLU's output, which is what b's gradient takes; then those of b, c, d.
    kept = [own.kept_bytes for own in (a, b, c, d, e)]
    assert kept == [128, 128, 128, 128, 0]
    # No weights before a; none before b; e has only an input gradient.
    assert a.recompute is None and a.backward is None
    assert b.backward is not None and b.input_gradient is None
    assert c.input_gradient is not None and c.weight_gradient is not None
    assert e.input_gradient is not None and e.weight_gradient is None
    assert found.seconds(0, "backward", 8) == 0.0
    assert found.optimizer == "Adam"
    assert found.loss is None


def test_equal_layers_are_measured_once():
    layers = [keras.Input((4,)), *(kl.Dense(4, "relu") for _ in range(4))]
    first, *others = profile(layers).layers
    assert first.measured != others[0].measured  # it has no input gradient
    assert len({layer.measured for layer in others}) == 1
    assert len({layer.key for layer in [first, *others]}) == 1


def test_nothing_changes():
    layers = [kl.Dense(4), kl.BatchNormalization(), kl.Dropout(0.5)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    model.fit(ONES, ONES, verbose=0)
    seeds = layers[2].seed_generator.state
    before = [v.numpy() for v in [*model.variables, seeds]]
    stored = [v.value for v in model.variables]
    draws = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    profile(model, ONES, ONES)
    for value, variable in zip(before, [*model.variables, seeds]):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert all(v.value is own for v, own in zip(model.variables, stored))
    assert random.getstate() == draws[0]
    np.testing.assert_array_equal(np.random.get_state()[1], draws[1])  # noqa: NPY002


def test_random_numbers_after_it_are_those_without_it():
    def drawn(measures):
        keras.utils.set_random_seed(3)
        layers = [keras.Input((4,)), kl.Dropout(0.5), kl.Dense(2)]
        if measures:
            profile(layers)
        values = tf.random.normal([2]), keras.random.normal((2,))
        weights = tfgpipe.GPipe(layers, 1).get_weights()
        return np.concatenate([np.ravel(v) for v in [*values, *weights]])

    np.testing.assert_array_equal(drawn(True), drawn(False))


def test_layers_get_storage_from_a_gpipe_afterwards():
    layers = [kl.Dense(4, "relu"), kl.Dense(4, "relu"), kl.Dense(1)]
    found = profile(layers)
    assert not any(internals.is_created(v) for la in layers for v in la.weights)
    devices = ["CPU:2", "CPU:3"]
    model = tfgpipe.GPipe(layers, 2, 2, devices=devices, costs=found)
    model.compile("sgd", "mse")
    history = model.fit(ONES, ONES[:, :1], verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert model.cells()[0].unit == "s"
    total = sum(cell.cost for cell in model.cells())
    assert total == pytest.approx(sum(found.costs()))


def test_functional_model_with_several_inputs():
    a = keras.Input((4,), name="a")
    b = keras.Input((3,), dtype="int32", name="b")
    embedded = kl.Flatten()(kl.Embedding(5, 4)(b))
    total = kl.Add()([kl.Dense(1)(embedded), kl.Dense(1)(a)])
    model = keras.Model({"a": a, "b": b}, total)
    ids = np.zeros((8, 3), "int64")
    found = profile(model, {"a": ONES, "b": ids})
    steps = tfgpipe.layers_of(model)
    assert [own.name for own in found.layers] == [s.layer.name for s in steps]
    gpipe = tfgpipe.GPipe(keras.models.clone_model(model), 2, costs=found)
    assert gpipe.cells()[0].unit == "s"


def test_model_with_a_call_of_its_own_is_measured_as_its_graph():
    own, graph = own_call.Residual(), own_call.functional()
    labels = np.zeros((8, 2), "float32")
    found, other = (profile(m, ONES, labels, loss="mse") for m in (own, graph))

    def facts(record):
        (tasks,) = record.measured
        kinds = [kind for kind in MEASURED if getattr(tasks, kind)]
        sizes = record.weight_bytes, tasks.output_bytes, tasks.kept_bytes
        return record.key, record.num_params, sizes, kinds

    records = [*found.layers, found.loss]
    expected = [*other.layers, other.loss]
    assert [*map(facts, records)] == [*map(facts, expected)]
    model = tfgpipe.GPipe(own_call.Residual(), 2, costs=found)
    model.compile("sgd", "mse")
    model.fit(ONES, labels, verbose=0)
    assert [cell.unit for cell in model.cells()] == ["s", "s"]
    total = sum(cell.cost for cell in model.cells())
    assert total == pytest.approx(sum(found.costs()))


def test_loss_is_measured_behind_the_last_layer():
    layers = [keras.Input((4,)), kl.Dense(3)]
    labels = np.zeros(8, "int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = profile(layers, ONES, labels, loss=loss)
    assert found.loss.name == "loss"
    assert found.loss.measured[-1].backward is not None
    assert found.loss.weight_bytes == 0


def test_xla_compiles_if_asked_to_and_by_default_on_accelerators(monkeypatch):
    layers = [keras.Input((4,)), kl.Dense(4)]
    assert not profile(layers).jit_compile
    monkeypatch.setattr(names, "has_accelerator", bool)
    assert profile(layers).jit_compile
    found = profile([kl.Dense(4), kl.Dense(2)], jit_compile=True)
    assert found.jit_compile
    last = found.layers[1].measured[-1]
    assert last.recompute == last.recompute_last is not None
    assert last.backward is not None and last.input_gradient is not None
    assert ", compiled by XLA" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "`seconds` must be a finite"),
        ({"seconds": True}, "`seconds` must be a finite"),
        ({"seconds": float("inf")}, "`seconds` must be a finite"),
        ({"device": "GPU:7"}, "`devices` must be .*'GPU:7'"),
        (
            {"micro_batch_sizes": [9]},
            "`micro_batch_sizes` must .*rows of `x`, 8",
        ),
        ({"micro_batch_sizes": []}, "`micro_batch_sizes` must be"),
        ({"micro_batch_sizes": [True]}, "`micro_batch_sizes` must be"),
        ({"micro_batch_sizes": 4}, "`micro_batch_sizes` must be"),
        ({"y": ONES}, "`y` and `loss` must be given together"),
        ({"loss": "mse"}, "`y` and `loss` must be given together"),
        ({"y": ONES[:4], "loss": "mse"}, "`y` must have the same number|rows"),
        ({"y": ONES, "loss": keras.losses.Dice()}, "`loss` must add up"),
        ({"x": iter([])}, "unsupported type"),
        ({"optimizer": "gradually"}, "gradually"),
        ({"x": {}}, "`x` must hold the inputs"),
        ({"jit_compile": "on"}, "`jit_compile` must be True or False"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments, message, monkeypatch
):
    monkeypatch.setattr(tfgpipe.profiles.profiler, "LayersAlone", None)
    with pytest.raises(ValueError, match=message):
        profile([kl.Dense(4)], **arguments)


class Failing(kl.Layer):
    """Has no gradient."""

    def call(self, x):
        @tf.custom_gradient
        def fail(x):
            def gradient(dy):
                raise RuntimeError("out of order")

            return tf.identity(x), gradient

        return fail(x)


def test_layer_that_cannot_be_measured_is_named():
    layers = [keras.Input((4,)), kl.Dense(4), Failing(name="culprit")]
    with pytest.raises(
        ValueError, match=r"out of order\nIn the gradient of layer 'culprit'"
    ):
        profile(layers)


def test_tied_and_equal_weights_are_counted_where_they_are():
    shared = kl.Dense(4, name="shared")
    layers = [kl.Dense(4), shared, kl.ReLU(), shared, kl.Dense(4)]
    x = np.ones((2, 4), "float32")
    found = profile([keras.Input((4,)), *layers], x, optimizer=None)
    assert [own.weight_bytes for own in found.layers] == [80, 80, 0, 0, 80]
    assert [own.slot_bytes for own in found.layers] == [0] * 5
    assert found.optimizer == "none"
