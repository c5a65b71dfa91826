import json
import os
import shutil

import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe
from tfgpipe.callbacks import Checkpoint
from tfgpipe.checkpoints import Folder, folder
from tfgpipe.checkpoints.restore import matched

ROWS, BATCH = 24, 4


def layers():
    return [
        keras.Input((4,)),
        kl.Dense(6, activation="relu"),
        kl.BatchNormalization(),
        kl.Dropout(0.3, seed=1),
        kl.Dense(4),
        kl.Dense(2),
    ]


def plain_layers():
    """Without what differs from plain Keras with micro-batches, by design."""
    return [keras.Input((4,)), kl.Dense(6, activation="relu"), kl.Dense(2)]


def assert_untouched(model, before):
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def made(k=2, m=2, make=layers, optimizer=None, **options):
    keras.utils.set_random_seed(4)
    model = tfgpipe.GPipe(make(), k, m, **options)
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def data(first=0):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((ROWS, 4)), rng.standard_normal((ROWS, 2))
    return x[first * BATCH :], y[first * BATCH :]


def fit(model, first=0, **options):
    x, y = data(first)
    defaults = {"epochs": 3, "verbose": 0, "shuffle": False}
    model.fit(x, y, BATCH, **{**defaults, **options})
    return model


def state(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def assert_same(found, expected):
    for a, b in zip(state(found), state(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def saved(folder, model=None, epochs=1, **options):
    save = Checkpoint(folder, **options)
    return fit(model or made(), epochs=epochs, callbacks=[save])


@pytest.fixture(scope="module")
def expected():
    """What a training that was never interrupted ends with."""
    return fit(made())


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A folder with a checkpoint every two steps of one epoch."""
    folder = tmp_path_factory.mktemp("once")
    saved(folder, every=2)
    return folder


@pytest.fixture
def copy(once, tmp_path):
    """Such a folder, to be damaged."""
    return shutil.copytree(once, tmp_path / "copy")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"k": 1}, marks=pytest.mark.slow),
        pytest.param({"k": 4, "schedule": "1f1b"}, marks=pytest.mark.slow),
        {"k": 4, "remat": "always", "skip_nonfinite": True},
    ],
)
def test_training_goes_on_with_other_cells_to_the_bit(once, expected, options):
    model = made(**options)
    found = tfgpipe.restore(model, once)
    assert found == (str(once / "step-0000000006"), 6, 1, 0)
    assert_same(fit(model, initial_epoch=found.epoch), expected)


def test_what_keras_does_not_list_of_an_optimizer_goes_on_too(tmp_path):
    """`Nadam` in a `LossScaleOptimizer`: one product for all weights."""

    def new(k):
        inner = keras.optimizers.Nadam(0.1)
        scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
        return made(k=k, make=plain_layers, optimizer=scaled)

    expected = fit(new(1))
    saved(tmp_path, new(1))
    found = tfgpipe.restore(model := new(2), tmp_path)
    assert_same(fit(model, initial_epoch=found.epoch), expected)


def test_training_goes_on_within_an_epoch(tmp_path, expected):
    saved(tmp_path, every=4, epochs=2)
    shutil.rmtree(tmp_path / "step-0000000012")
    model = made(k=3)
    found = tfgpipe.restore(model, tmp_path, step=8)
    assert found[1:] == (8, 1, 2)
    save = Checkpoint(tmp_path, every=3, resumed=found, keep=9)
    fit(
        model,
        found.batch,
        initial_epoch=found.epoch,
        epochs=found.epoch + 1,
        callbacks=[save],
    )
    again = tfgpipe.restore(made(), tmp_path, step=9)
    assert again[1:] == (9, 1, 3)
    found = tfgpipe.restore(model, tmp_path, step=12)
    assert found[1:] == (12, 2, 0)
    assert_same(fit(model, initial_epoch=found.epoch), expected)


def test_replicas_go_on_as_one_pipeline(tmp_path):
    expected = fit(made(k=2, m=4))
    with tfgpipe.PipelineStrategy(2, 2).scope():
        saved(tmp_path, made(k=2, m=2))
    model = made(k=2, m=4)
    tfgpipe.restore(model, tmp_path)
    fit(model, initial_epoch=1)
    for a, b in zip(state(model), state(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_plain_keras_writes_and_reads_them_too(tmp_path):
    model = keras.Sequential(plain_layers())
    model.compile(keras.optimizers.Adam(0.01), "mse")
    saved(tmp_path / "plain", model)
    pipeline = made(make=plain_layers)
    assert tfgpipe.restore(pipeline, tmp_path / "plain").step == 6
    assert_same(pipeline, model)
    saved(tmp_path / "pipeline", pipeline)
    other = keras.Sequential(plain_layers())
    other.compile(keras.optimizers.Adam(0.01), "mse")
    assert tfgpipe.restore(other, tmp_path / "pipeline").step == 12
    assert_same(other, pipeline)


def test_skipped_mini_batches_are_counted(tmp_path):
    def spoiled(model, **options):
        x, y = data()
        x[BATCH] = np.nan
        model.fit(x, y, BATCH, verbose=0, shuffle=False, **options)
        return model

    saving = Checkpoint(tmp_path, every=2, keep=9)
    spoiled(made(skip_nonfinite=True), callbacks=[saving])
    model = made(skip_nonfinite=True)
    assert tfgpipe.restore(model, tmp_path).step == 6
    assert (model.num_skipped, int(model.optimizer.iterations)) == (1, 5)
    other = made()  # has no count
    assert tfgpipe.restore(other, tmp_path).step == 6


def test_nothing_there_is_no_error(tmp_path):
    model = made()
    before = model.get_weights()
    assert tfgpipe.restore(model, tmp_path / "none") is None
    assert_untouched(model, before)


def damage(path, name="values.data-00000-of-00001"):
    found = bytearray((path / name).read_bytes())
    found[len(found) // 2] ^= 1
    (path / name).write_bytes(found)


def test_damaged_one_is_named_and_the_one_before_taken(copy):
    paths = sorted(copy.glob("step-*"))
    damage(paths[-1])
    (paths[-2] / "values.index").unlink()
    with pytest.warns(UserWarning, match="Left as it is") as caught:
        found = tfgpipe.restore(made(), copy)
    assert found.step == 2
    [warning] = [str(w.message) for w in caught]
    assert f"{paths[-1]}: values.data-00000-of-00001 is not as it" in warning
    assert f"{paths[-2]}: values.index is not as it was written" in warning
    with pytest.raises(ValueError, match="is not as it was written"):
        tfgpipe.restore(made(), copy, step=6)
    damage(paths[0], "manifest.json")
    model = made()
    before = model.get_weights()
    with pytest.raises(ValueError, match="None is left to go on from"):
        tfgpipe.restore(model, copy)
    assert_untouched(model, before)
    assert sorted(copy.glob("step-*")) == paths  # left where they are


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (plain_layers, None, r"Received: \d+ variables, and \d+ in .*step-"),
        (
            lambda: [*layers()[:-2], kl.Dense(5), kl.Dense(2)],
            None,
            r"\[6, 5\], 'float32'\], and \['.*', \[6, 4\]",
        ),
        (layers, "sgd", "the kind of optimizer"),
        (layers, keras.optimizers.Lamb(), r"\['Lamb'\]\. .* \['Adam'\]"),
    ],
)
def test_other_models_are_refused(once, make, optimizer, message):
    model = made(make=make, optimizer=optimizer)
    before = model.get_weights()
    with pytest.raises(ValueError, match=message):
        tfgpipe.restore(model, once)
    assert_untouched(model, before)


def test_model_that_is_not_compiled_gets_weights_and_state(once):
    model = tfgpipe.GPipe(layers(), 2)
    assert tfgpipe.restore(model, once).step == 6
    other = made()
    tfgpipe.restore(other, once)
    for a, b in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_step_must_be_there(once):
    with pytest.raises(ValueError, match=r"step=5, .* with steps \[2, 4, 6\]"):
        tfgpipe.restore(made(), once, step=5)


def test_model_must_be_built(once):
    model = tfgpipe.GPipe([kl.Dense(2)], 1)
    with pytest.raises(ValueError, match="`model` must be built"):
        tfgpipe.restore(model, once)


# ------------------------------------------------------------------ by names
def named(order="ab", frozen="", optimizer=None):
    """Two layers of equal shapes, "a" and "a_b", between others."""
    keras.utils.set_random_seed(4)
    names = {"a": "a", "b": "a_b", "c": "c", "d": "d"}
    two = {name: kl.Dense(4, name=names[name]) for name in order}
    for name in frozen:
        two[name].trainable = False
    model = tfgpipe.GPipe([keras.Input((4,)), *two.values(), kl.Dense(2)], 2)
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def by_layer(model):
    return {
        layer.name: [v.numpy() for v in layer.variables]
        for layer in model.layers
        if layer.name in ("a", "a_b")
    }


def test_layers_in_another_order_are_found_by_their_names(tmp_path):
    model = saved(tmp_path, named("ab"))
    other = named("ba")
    tfgpipe.restore(other, tmp_path)
    for name, values in by_layer(model).items():
        for a, b in zip(values, by_layer(other)[name], strict=True):
            np.testing.assert_array_equal(a, b)
    slots = [
        {v.path.partition("_a_")[2]: v.numpy() for v in m.optimizer.variables}
        for m in (model, other)
    ]
    for name, value in slots[0].items():
        if name:
            np.testing.assert_array_equal(value, slots[1][name])


def test_slots_of_another_layer_are_not_taken(tmp_path):
    saved(tmp_path, named(frozen="b"))
    model = named(frozen="a")
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"_b_.* the same layers frozen"):
        tfgpipe.restore(model, tmp_path)
    assert_untouched(model, before)


@pytest.mark.parametrize("order", ["bc", "cd"])
def test_other_names_are_an_error(tmp_path, order):
    saved(tmp_path, named("ab"))
    with pytest.raises(ValueError, match=r"c/kernel.* none of that name"):
        tfgpipe.restore(named(order), tmp_path)


def test_learning_rate_is_the_saved_one(tmp_path):
    lower = keras.callbacks.LearningRateScheduler(lambda epoch: 0.001)
    fit(named(), epochs=1, callbacks=[lower, Checkpoint(tmp_path)])
    model = named(optimizer=keras.optimizers.Adam(0.5))
    tfgpipe.restore(model, tmp_path)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.001)


def test_names_are_matched_whatever_the_numbers():
    own = ["g_pipe_3/dense_4/kernel", "seed/seed_generator_state"]
    own += ["g_pipe_3/dense_7/kernel"]
    saved = ["dense/kernel", "seed_9/seed_generator_state", "dense_1/kernel"]
    assert matched(own, saved) == [0, 1, 2]
    saved = ["m/b/kernel", "m/a/kernel", "m/a/kernel"]
    own = ["a/kernel", "a/kernel", "b/kernel"]
    assert matched(own, [*saved]) == [1, 2, 0]
    saved = ["m/block_1/k", "m/block_2/k", "m/dense/k", "m/dense_1/k"]
    own = ["block_2/k", "block_1/k", "dense_8/k", "dense_9/k"]
    assert matched(own, saved) == [1, 0, 2, 3]


# ---------------------------------------------------------- what others wrote
def forged(path, **changed):
    """A manifest with a right checksum, and other contents."""
    text = (path / "manifest.json").read_text()
    content = {**json.loads(text)["content"], **changed}
    found = {"content": content, "sha256": folder._digest(content)}
    (path / "manifest.json").write_text(json.dumps(found))


WRONG = [
    {"position": {"step": 6}},
    {"position": [6, 1, 0]},
    {"position": {"step": 12, "epoch": 1, "batch": 0}},
    {"variables": None},
    {"files": None},
    {"format": 99},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_manifest_of_others_is_damaged(copy, wrong):
    last = sorted(copy.glob("step-*"))[-1]
    forged(last, **wrong)
    with pytest.warns(UserWarning, match=f"{last.name}: .*manifest.json.* Lef"):
        assert tfgpipe.restore(made(), copy).step == 4
    assert Folder(copy).best("min", "loss") is None
    Folder(copy).keep(1, "min", "loss", 6)


@pytest.mark.parametrize("kind", ["pipe", "deep", "folder", "link", "long"])
def test_manifest_that_is_none_is_damaged(copy, kind):
    last = sorted(copy.glob("step-*"))[-1]
    path = last / "manifest.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 100_000 if kind == "deep" else "9" * 10_000)
    with pytest.warns(UserWarning, match=f"{last.name}: manifest.json .* Left"):
        assert tfgpipe.restore(made(), copy).step == 4


def test_link_in_the_place_of_a_checkpoint_stops_no_start(copy):
    """What it leads to is left alone."""
    first, _, last = sorted(copy.glob("step-*"))
    elsewhere = copy.parent / "elsewhere"
    shutil.move(last, elsewhere)
    last.symlink_to(copy.parent / "nowhere")
    shutil.rmtree(first)
    first.symlink_to(elsewhere)
    model = made()
    with pytest.warns(UserWarning, match=f"{last.name}: manifest.json"):
        found = tfgpipe.restore(model, copy)
    save = Checkpoint(copy, keep=1)
    fit(model, initial_epoch=found.epoch, epochs=2, callbacks=[save])
    assert tfgpipe.restore(made(), copy).step > found.step
    assert elsewhere.is_dir()
