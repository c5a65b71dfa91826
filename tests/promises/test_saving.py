"""What was saved with some cells is loaded with others, and trains on."""

import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_presets
from keras import layers as kl
from sharing_layers import Logits, Noise
from tiny import (
    assert_close,
    assert_same,
    compiled,
    data,
    fit,
    layers,
    pipeline,
    random_layers,
    sequential,
    state,
    weights,
)

import tfgpipe
from tfgpipe.schedules import search
from tfgpipe.schedules.orders import SCHEDULES
from tfgpipe.schedules.schedule import Schedule


def trained(make=random_layers, **kwargs):
    model = compiled(pipeline(make, **kwargs), metrics=["mae"])
    fit(model, *data())
    return model


def untrained(make=layers, **kwargs):
    """As it comes out of training, but for values."""
    model = compiled(pipeline(make, **kwargs), metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def continued(model):
    """Trains on; everything that must be equal afterwards."""
    fit(model, *data(), initial_epoch=2, epochs=4)
    cells = model.built_for("a test").cells
    seeds = [v.numpy() for cell in cells for v in cell.seeds]
    return state(model) + seeds


def arguments(model):
    """The configuration without that of the layers."""
    config = model.get_config()
    return {key: config[key] for key in config if key != "layers"}


def devices_of(model):
    return [
        tf.DeviceSpec.from_string(v.value.device).device_index
        for v in model.weights
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files after two epochs, and the state after two more without a stop."""
    keras.utils.set_random_seed(7)
    folder = tmp_path_factory.mktemp("saved")
    model = trained(k=4)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.write(str(folder / "checkpoint"))
    return folder, continued(model)


# -------------------------------------------------------------------- files
@pytest.mark.parametrize("k", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_keras_file_trains_on_bit_identically(saved, k):
    folder, expected = saved
    model = tfgpipe.load_model(folder / "model.keras", num_partitions=k)
    assert model.num_partitions == len(model.cells()) == k
    assert model.num_micro_batches == 3
    assert_same(continued(model), expected)


def other(k):
    """A model with other weights, slots and seeds than the saved one."""
    keras.utils.set_random_seed(1)
    return compiled(tfgpipe.GPipe(random_layers(), k, 3), metrics=["mae"])


@pytest.mark.parametrize(("k", "has_slots"), [(4, True), (2, False)])
def test_tf_checkpoint_trains_on_bit_identically(saved, k, has_slots):
    folder, expected = saved
    model = other(k)
    if has_slots:  # otherwise they are restored when they are created
        model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    status = checkpoint.read(str(folder / "checkpoint"))
    status.assert_existing_objects_matched()
    assert_same(continued(model), expected)


def test_weights_file_trains_on_bit_identically(saved):
    folder, expected = saved
    model = other(1)
    model.load_weights(folder / "model.weights.h5")
    assert_same(continued(model), expected)


def test_arguments_are_saved(tmp_path):
    path = str(tmp_path / "model.keras")
    own = Schedule(SCHEDULES["1f1b"](2, 3).tasks)
    first, *layers = random_layers()
    costs = 5.0, lambda layer, spec: 1 + spec.shape[-1], 1, 1.5
    model = trained(
        lambda: [first, *zip(layers, costs)],
        k=2,
        m=3,
        devices=["CPU:3", "CPU:1"],
        layers_per_cell=[3, 1],
        schedule=own,
        remat={1: 0.4, 0: "offload"},
        name="chosen",
    )
    assert [cell.cost for cell in model.cells()] == [13.0, 1.5]
    model.save(path)
    for load in (tfgpipe.load_model, keras.saving.load_model):
        loaded = load(path)
        assert arguments(loaded) == arguments(model)
        assert loaded.schedule == model.schedule
        assert loaded.remat == {0: "offload", 1: 0.4}
        assert isinstance(loaded, tfgpipe.GPipe) and loaded.name == "chosen"
        assert devices_of(loaded) == devices_of(model)
        assert loaded.cells() == model.cells()
        x, y = data()
        before = state(model)
        assert_same(state(loaded), before)
    for one in (loaded, model):
        fit(one, x, y, epochs=1)
    assert_same(state(loaded), state(model))


def four():
    return [keras.Input((3,)), *(keras.layers.Dense(3) for _ in range(4))]


@pytest.mark.parametrize(
    "schedule",
    ["zero_bubble_v", search([(1, 1, 1)] * 4, 3, devices=[0, 1, 1, 0])],
)
def test_two_cells_a_device_come_back_under_a_strategy(tmp_path, schedule):
    path = str(tmp_path / "model.keras")
    with tfgpipe.PipelineStrategy(2, 2).scope():
        model = pipeline(four, k=4, m=3, schedule=schedule)
    model.save(path)
    with tfgpipe.PipelineStrategy(2, 2).scope():
        loaded = tfgpipe.load_model(path)
    found = [cell.device[-1] for cell in loaded.cells()]
    assert found == [cell.device[-1] for cell in model.cells()] == [*"0110"]
    assert loaded.schedule == model.schedule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_partitions": 1}, r"must be those of `schedule`, \(2, 3\)"),
        ({"num_micro_batches": 2}, r"must be those of `schedule`, \(2, 3\)"),
        ({"num_partitions": 1, "schedule": "1f1b"}, "`remat` must map"),
    ],
)
def test_what_was_written_for_other_cells_has_to_be_passed(
    tmp_path, changes, message
):
    path = str(tmp_path / "model.keras")
    own = Schedule(SCHEDULES["1f1b"](2, 3).tasks)
    untrained(k=2, m=3, schedule=own, remat={1: "never"}).save(path)
    with pytest.raises(ValueError, match=message):
        tfgpipe.load_model(path, **changes)
    changes = {**changes, "schedule": "gpipe", "remat": "never"}
    loaded = tfgpipe.load_model(path, **changes)
    assert loaded.num_partitions == changes.get("num_partitions", 2)


def test_load_model_without_a_pipeline_is_an_error(tmp_path):
    path = str(tmp_path / "model.keras")
    sequential().save(path)
    with pytest.raises(ValueError, match=r"must hold a `tfgpipe\.GPipe`"):
        tfgpipe.load_model(path, num_partitions=2)


def test_unbuilt_model_is_saved_and_loaded(tmp_path):
    path = str(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="has not yet been built"):  # Keras's
        tfgpipe.GPipe([(kl.Dense(3), 2.0), kl.Dense(2)], 2, 2).save(path)
    loaded = tfgpipe.load_model(path)
    compiled(loaded).train_on_batch(*data())
    assert loaded.cells()[0].cost == 2.0


# -------------------------------------------------------------- plain Keras
def test_weights_files_are_those_of_sequential(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    model = trained(layers, k=3, m=1)
    plain = compiled(sequential(), metrics=["mae"])
    fit(plain, *data(), epochs=1)
    for source, target in ((model, plain), (plain, model)):
        source.save_weights(path)
        target.load_weights(path)
        assert_same(state(target), state(source))
        for one in (source, target):
            fit(one, *data(), epochs=1)
        assert_close(state(target), state(source), tolerance=1e-5)


# ------------------------------------------------------------- other copies
def shared_seeds():
    """One dropout in three places, and two layers with one generator."""
    dropout, one = kl.Dropout(0.3, seed=1), Noise(3)
    other = Noise(4)  # which keeps its own generator, too
    other.seed_generator = one.seed_generator
    layers = [dropout, kl.Dense(4), dropout, one, dropout, kl.Dense(4, "relu")]
    layers += [other, kl.Dropout(0.3, seed=2), kl.Dense(2)]
    return [keras.Input((4,)), *layers]


def test_seeds_that_cells_share_are_saved_once(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    model = trained(shared_seeds, k=4)
    model.save_weights(path)
    with h5py.File(path) as file:
        assert len(file["random_state/vars"]) == 4
    keras.utils.set_random_seed(1)
    other = compiled(pipeline(shared_seeds, k=2), metrics=["mae"])
    fit(other, *data(), epochs=1)
    other.load_weights(path)
    assert_same(continued(other), continued(model))


def test_seeds_of_another_model_are_not_loaded_without_a_word(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    pipeline(shared_seeds).save_weights(path)
    layers = shared_seeds()
    layers[-2] = kl.Activation("relu")
    other = tfgpipe.GPipe(layers, 2, 2)
    with pytest.warns(UserWarning, match="must be 3, .* none of 4 in"):
        other.load_weights(path)


def test_load_model_changes_arguments(tmp_path):
    path = str(tmp_path / "model.keras")
    model = untrained(k=1, remat_groups=3, gradient_dtype="bfloat16")
    model.save(path)
    with pytest.raises(
        ValueError, match="at most the number of layers of every cell"
    ):
        tfgpipe.load_model(path, num_partitions=2)
    loaded = tfgpipe.load_model(
        path,
        num_partitions=2,
        num_micro_batches=2,
        devices=["CPU:5", "CPU:3"],
        remat_groups=1,
        layers_per_cell=[2, 1],
        gradient_dtype=None,
    )
    assert loaded.num_micro_batches == 2
    assert set(devices_of(loaded)) == {5, 3}
    slots = {v.value.device[-1] for v in loaded.optimizer.variables[2:]}
    assert slots == {"5", "3"}
    found = arguments(loaded)
    assert found["remat_groups"] == 1
    assert found["layers_per_cell"] == [2, 1]
    assert found["gradient_dtype"] is None
    assert_same(state(loaded), state(model))
    with pytest.raises(ValueError, match="`remat_groups` must be an integer"):
        tfgpipe.load_model(path, remat_groups=0)


@keras.saving.register_keras_serializable("test_saving")
class Holds(kl.Layer):
    """A layer that makes another one, as blocks of KerasHub do."""

    def build(self, shape):
        self.inner = kl.Dense(shape[-1])
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def test_adapters_inside_of_others_are_loaded_as_weights(tmp_path):
    path, x = str(tmp_path / "model.keras"), data()[0]
    holds, dense = Holds(), kl.Dense(2)
    model = pipeline(lambda: [keras.Input((4,)), holds, dense])
    dense.enable_lora(1)
    model.save(path)
    tfgpipe.load_model(path)  # which knows of it
    holds.inner.enable_lora(1)
    holds.inner.lora_kernel_b.assign(keras.ops.ones((1, 4)))
    model.save(path)
    loaded = tfgpipe.load_model(path)
    assert_close(loaded(x), model(x), tolerance=1e-5)


# ------------------------------------------- what a model holds, besides layers
def members(path):
    """What is in a file: its parts, and the variables."""
    with zipfile.ZipFile(path) as file:
        found = set(file.namelist())
        with h5py.File(file.open("model.weights.h5")) as variables:
            variables.visititems(
                lambda name, item: found.add(f"{name}: {type(item).__name__}")
            )
    return {name for name in found if not name.endswith(": Group")}


def test_tokenizer_of_a_task_is_in_the_file(tmp_path):
    path, again, plain = (tmp_path / f"{name}.keras" for name in "abc")
    texts = ["abc de", "x", "hello"]
    task = tiny_presets.gpt2()
    task.compile(sampler="greedy")
    task.save(plain)
    expected = task.generate(texts, max_length=10), task.predict(texts)
    pipeline = tfgpipe.GPipe(tiny_presets.gpt2(), 2, 2)
    pipeline.build_optimizer()
    pipeline.save(path)
    tfgpipe.load_model(path, num_partitions=1).save(again)
    loaded = tfgpipe.load_model(again)
    loaded.model.compile(sampler="greedy")
    assert loaded.generate(texts, max_length=10) == expected[0]
    assert_close(loaded.predict(texts), expected[1], 1e-5)
    assets = {name for name in members(plain) if name.startswith("assets/")}
    assert len(assets) == 2
    for file in (path, again):
        assert {n for n in members(file) if n.startswith("assets/")} == assets
    assert pipeline.preprocessor is pipeline.model.preprocessor
    with pytest.raises(AttributeError, match=r"Set `model\.model\.preproc"):
        pipeline.preprocessor = None


@keras.saving.register_keras_serializable("test_saving")
class Holder(keras.Model):
    """Holds layers that its graph has not, in every way."""

    def __init__(self, inputs, outputs, **kwargs):
        super().__init__(inputs, outputs, **kwargs)
        self.blocks = [self.layers[1], kl.Dense(3)]  # before "layers"
        self.words = {"here": kl.StringLookup()}
        self._extra = kl.Dense(2)
        self.extra_metric = keras.metrics.Mean()
        for layer in (self.blocks[1], self._extra):
            layer.build((None, 2))

    def get_config(self):
        return {"name": self.name}

    @classmethod
    def from_config(cls, config):
        return holder(**config)

    @property
    def broken(self):
        raise RuntimeError("not now")


def holder(**kwargs):
    inputs = keras.Input((2,))
    return Holder(inputs, kl.Dense(2)(kl.Dense(3)(inputs)), **kwargs)


def test_layers_that_a_model_holds_are_where_keras_has_them(tmp_path):
    path, plain = tmp_path / "model.keras", tmp_path / "plain.keras"
    model = holder()
    model.words["here"].set_vocabulary(["a", "b"])
    model.save(plain)
    pipeline = tfgpipe.GPipe(model, 2, 2)
    pipeline.save(path)
    metric = {f"extra_metric/vars/{i}: Dataset" for i in range(2)}
    assert members(path) == members(plain) - metric  # which no step updates
    loaded = tfgpipe.load_model(path, num_partitions=1)
    assert_same(weights(loaded), weights(pipeline))
    assert loaded.model.words["here"].get_vocabulary() == ["[UNK]", "a", "b"]
    for source, target in ((model, loaded), (pipeline, holder())):
        name = str(tmp_path / "model.weights.h5")
        source.set_weights([w + 1 for w in source.get_weights()])
        source.save_weights(name)
        target.load_weights(name)
        assert_same(weights(target), weights(source))


# ------------------------------------------------------ back to plain Keras
def tied():
    """Layers that come twice, or hold each other."""
    embedding = kl.Embedding(7, 4)
    twice = kl.Dense(4, activation="tanh")
    inputs = keras.Input((3,), dtype="int32")
    rest = kl.Dropout(0.1), twice, Logits(embedding)
    return [inputs, embedding, twice, *rest]


def branches():
    a, b = (keras.Input((2,), name=name) for name in ("age", "zip"))
    h = kl.Dense(3, "relu")(a) * kl.Dense(3)(b)
    return keras.Model({"age": a, "zip": b}, kl.Dense(2)(h))


PAIR = np.random.default_rng(0).random((2, 6, 2), "float32")
BRANCHES = branches, {"age": PAIR[0], "zip": PAIR[1]}
WORDS = np.arange(12).reshape(4, 3) % 7


@pytest.mark.parametrize(
    ("make", "x"), [(tied, WORDS), BRANCHES, (layers, data()[0])]
)
def test_plain_file_is_written_by_the_model(tmp_path, make, x):
    saved, path = tmp_path / "best.keras", str(tmp_path / "plain.keras")
    model = tfgpipe.GPipe(make(), 2, 2)
    expected = model.predict(x, verbose=0)
    model.compile("sgd", "mse")
    best = keras.callbacks.ModelCheckpoint(saved)
    model.fit(x, 0 * expected, verbose=0, callbacks=[best])
    expected = model.predict(x, verbose=0)
    tfgpipe.load_model(saved, num_partitions=1).model.save(path)
    for _ in range(2):
        with zipfile.ZipFile(path) as file:
            assert b"gpipe" not in file.read("config.json").lower()
        plain = keras.saving.load_model(path)
        assert not isinstance(plain, tfgpipe.GPipe)
        assert plain.count_params() == model.count_params()
        assert_close([plain.predict(x, verbose=0)], [expected], 1e-5)
        model.model.save(path)
    assert model.model is model.model
    assert_same(weights(model.model), weights(model))


# --------------------------------------------------------------- serving
def signatures(model, path):
    """What a model that was exported takes and gives, with names."""
    model.export(str(path), verbose=False)
    served = tf.saved_model.load(str(path))
    function = served.signatures["serving_default"]
    return repr(
        [
            function.structured_input_signature,
            function.structured_outputs,
            *(
                f.structured_input_signature
                for f in served.serve.concrete_functions
            ),
        ]
    )


def several(kind):
    a = keras.Input((1,), name="age")
    b = keras.Input((2,), name="zip", dtype="int32")
    h = a + kl.Dense(3)(keras.ops.cast(b, "float32"))
    if kind == "dict":
        return keras.Model({"age": a, "zip": b}, {"u": kl.Dense(2)(h), "v": h})
    if kind == "nest":
        return keras.Model({"p": [a], "q": (b,)}, kl.Dense(2)(h))
    return keras.Sequential([a, kl.Dense(3), kl.Dense(2)])


@pytest.mark.parametrize("kind", ["dict", "nest", "sequential"])
def test_export_has_the_signature_of_the_plain_model(tmp_path, kind):
    models = several(kind), tfgpipe.GPipe(several(kind), 2)
    expected, found = (
        signatures(model, tmp_path / str(i)) for i, model in enumerate(models)
    )
    assert found == expected
    assert "age" in found


def test_plain_model_of_a_list_has_a_name_for_each_input():
    """Whatever the keys are that data came by."""
    x, _ = data()
    layer = kl.Lambda(lambda x: sum(x[key] for key in ("a", "b/c", "d")))
    model = tfgpipe.GPipe([layer, kl.Dense(2, name="a")], 2, 2)
    found = model.predict({"a": x, "b/c": x, "d": x}, verbose=0)
    assert len({"a", *model.input_names}) == 4
    assert "d" in model.input_names
    with pytest.warns(UserWarning, match="must match the names"):  # Keras's
        plain = model.model
    assert_same([plain({"a": x, "b/c": x, "d": x})], [found])


# ------------------------------------------------------------ other machines
def rewritten(path, name, change):
    """Changes the bytes of a part of a file."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    parts[name] = change(parts[name])
    with zipfile.ZipFile(path, "w") as file:
        for part, content in parts.items():
            file.writestr(part, content)


COUNT = len(tf.config.list_logical_devices("CPU"))
# Of how many cells, what the file says instead, and what is said of it.
ELSEWHERE = [
    (
        2,
        (b"CPU:1", b"CPU:99"),
        r"devices.*'CPU:99'",
    ),
    (
        COUNT,
        tuple(b'"num_partitions": %d' % k for k in (COUNT, COUNT + 1)),
        f"num_partitions={COUNT + 1} and devices=",
    ),
]


@pytest.mark.parametrize(("k", "texts", "expected"), ELSEWHERE)
def test_file_of_another_machine_says_how_to_load_it(
    tmp_path, k, texts, expected
):
    path = str(tmp_path / "model.keras")
    layers = [keras.Input((4,)), *(kl.Dense(2) for _ in range(COUNT + 1))]
    devices = ["CPU:0", "CPU:1"] if k == 2 else None
    model = tfgpipe.GPipe(layers, k, devices=devices)
    model.save(path)
    rewritten(path, "config.json", lambda content: content.replace(*texts))
    for load in (tfgpipe.load_model, keras.saving.load_model):
        with pytest.raises(Exception, match=expected):
            load(path)
    loaded = tfgpipe.load_model(path, num_partitions=1)
    assert_same(weights(loaded), weights(model))
