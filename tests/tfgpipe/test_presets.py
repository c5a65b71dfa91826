"""Presets of KerasHub, loaded onto the devices of a pipeline."""

import os
import shutil

import h5py
import keras
import numpy as np
import pytest
import tiny_presets
from keras_hub import models

import tfgpipe
from tfgpipe import internals

CPUS = ["CPU:1", "CPU:2"]
SHARD = 10e3 / 2**30  # bytes of a shard, in the unit of `save_to_preset`


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same task in one file, and in several."""
    folder = tmp_path_factory.mktemp("presets")
    task = tiny_presets.llama()
    task.save_to_preset(folder / "whole")
    task.save_to_preset(folder / "shards", max_shard_size=SHARD)
    assert sum("model_0" in name for name in os.listdir(folder / "shards")) > 2
    return folder


def load(folder, task="LlamaCausalLM", **kwargs):
    return tfgpipe.load_preset(
        task, folder, 2, devices=CPUS, preprocessor=None, **kwargs
    )


@pytest.mark.parametrize("name", ["whole", "shards"])
def test_loaded_weights_are_those_of_the_files_on_their_devices(folders, name):
    pipeline = load(folders / name)
    expected = tiny_presets.llama().weights
    for a, b in zip(expected, pipeline.model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    for cell, device in zip(pipeline.cells(), CPUS):
        assert cell.device.endswith(device)
    held = [w.value.device[-5:] for w in pipeline.model.weights]
    assert held == sorted(held) and {*held} == {*CPUS}


def test_preset_that_is_converted_is_loaded(tmp_path):
    tiny_presets.transformers_llama(tmp_path / "hf")
    plain = models.Llama3CausalLM.from_preset(
        str(tmp_path / "hf"), preprocessor=None
    )
    pipeline = load(tmp_path / "hf", "CausalLM")
    held = {w.value.device[-5:] for w in pipeline.model.weights}
    assert held == {*CPUS}
    for a, b in zip(plain.weights, pipeline.model.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_loading_leaves_seeds_and_names_as_keras_does(folders):
    keras.utils.set_random_seed(4)
    models.LlamaCausalLM.from_preset(str(folders / "whole"), preprocessor=None)
    expected = keras.layers.Dense(3, name=None)
    expected.build((None, 2))
    keras.backend.clear_session()
    keras.utils.set_random_seed(4)
    load(folders / "whole")
    found = keras.layers.Dense(3)
    found.build((None, 2))
    np.testing.assert_array_equal(expected.kernel, found.kernel)
    assert found.name == "dense"


def test_arguments_go_to_the_preset_and_to_the_pipeline(folders):
    pipeline = load(
        folders / "whole",
        models.CausalLM,
        num_micro_batches=3,
        dtype="bfloat16",
        remat="never",
    )
    assert pipeline.num_micro_batches == 3 and pipeline.remat == "never"
    assert {w.dtype for w in pipeline.weights} == {"bfloat16"}
    pipeline = tfgpipe.load_preset(
        "LlamaBackbone", folders / "shards", 2, devices=CPUS
    )
    assert isinstance(pipeline.model, models.LlamaBackbone)


def test_new_weights_are_those_of_keras(folders):
    keras.utils.set_random_seed(4)
    arguments = {"load_weights": False, "preprocessor": None}
    plain = models.LlamaCausalLM.from_preset(
        str(folders / "whole"), **arguments
    )
    keras.utils.set_random_seed(4)
    pipeline = load(folders / "whole", load_weights=False)
    for a, b in zip(plain.weights, pipeline.model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


HEADS = ["bert", "distil_bert", "vit", "resnet", "roberta"]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Tasks with a head, as made: compiled, and their optimizers not built."""
    folder = tmp_path_factory.mktemp("heads")
    for name in HEADS:
        getattr(tiny_presets, name)().save_to_preset(folder / name)
    return folder


def plain_and_loaded(cls, folder, **kwargs):
    """What KerasHub makes of a preset, and what is in the pipeline."""
    keras.utils.set_random_seed(3)
    plain = cls.from_preset(str(folder), **kwargs)
    keras.utils.set_random_seed(3)
    pipeline = tfgpipe.load_preset(cls, folder, 2, devices=CPUS, **kwargs)
    assert {w.value.device[-5:] for w in pipeline.weights} == {*CPUS}
    for a, b in zip(plain.weights, pipeline.model.weights, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    return plain, pipeline.model


@pytest.mark.parametrize("name", HEADS)
def test_task_with_a_head_is_loaded_as_it_was_saved(heads, name):
    made = getattr(tiny_presets, name)()
    plain, loaded = plain_and_loaded(type(made), heads / name)
    for a, b in zip(made.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    assert loaded.compiled and not loaded.optimizer.built
    assert type(loaded.preprocessor) is type(plain.preprocessor)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_classes": 5, "activation": "softmax"},
        {"preprocessor": None},
        {"dtype": "bfloat16"},
        {"load_weights": False},
        {"compile": False},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_arguments_of_a_task_with_a_head_go_through(heads, kwargs):
    plain, loaded = plain_and_loaded(
        models.TextClassifier, heads / "bert", **kwargs
    )
    assert loaded.output_shape == plain.output_shape
    assert loaded.compiled == plain.compiled == ("compile" not in kwargs)
    assert (loaded.preprocessor is None) == (plain.preprocessor is None)
    assert loaded.output_dense.activation is plain.output_dense.activation


def test_backbone_that_was_there_before_is_loaded(heads):
    """KerasHub assigns to variables that it has not made."""

    def backbone(**kwargs):
        return models.BertBackbone.from_preset(str(heads / "bert"), **kwargs)

    plain = models.BertTextClassifier.from_preset(
        str(heads / "bert"), backbone=backbone(load_weights=False)
    )
    pipeline = tfgpipe.load_preset(
        "BertTextClassifier",
        heads / "bert",
        2,
        devices=CPUS,
        backbone=backbone(load_weights=False),
    )
    for a, b in zip(plain.weights, pipeline.model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_learning_rate_and_iterations_are_those_of_the_preset(tmp_path):
    """As in plain Keras, if the saved optimizer had made no step."""
    task = tiny_presets.bert()
    task.compile(keras.optimizers.Adam(0.125))
    task.optimizer.iterations.assign(7)
    task.save_to_preset(tmp_path / "bert")
    for model in plain_and_loaded(type(task), tmp_path / "bert"):
        assert float(model.optimizer.learning_rate) == 0.125
        assert int(model.optimizer.iterations) == 7


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_preset_in_the_scope_of_deferred_is_refused_with_the_cure(
    heads, folders, name
):
    cls, folder = {
        "bert": (models.TextClassifier, heads / "bert"),
        "llama": (models.LlamaCausalLM, folders / "whole"),
    }[name]
    kwargs = {"preprocessor": None}
    words = "(?s)A model that was made in.*Received: variable.*load_preset"
    with pytest.raises(ValueError, match=words), tfgpipe.deferred():
        cls.from_preset(str(folder), **kwargs)
    with tfgpipe.deferred():  # there is nothing to load
        task = cls.from_preset(str(folder), load_weights=False, **kwargs)
    assert not any(map(internals.is_created, task.trainable_weights))


def test_loaded_model_takes_adapters(folders):
    pipeline = load(folders / "whole")
    pipeline.model.backbone.enable_lora(2)
    adapters = [w for w in pipeline.model.weights if "lora" in w.path]
    assert adapters and all(w.trainable for w in adapters)


def test_trained_task_is_saved_and_loaded_again(folders, tmp_path):
    """Variable by variable: none is copied but the one that is written."""
    pipeline = load(folders / "whole")
    for weight in pipeline.weights:
        weight.assign(weight + 1)
    pipeline.model.save_to_preset(str(tmp_path / "new"), max_shard_size=SHARD)
    expected = pipeline.model.get_weights()
    plain = models.CausalLM.from_preset(
        str(tmp_path / "new"), preprocessor=None
    )
    for model in (plain, load(tmp_path / "new").model):
        for a, b in zip(expected, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def changed(folders, name, path, change):
    """A copy of a preset with one file that is not as it was."""
    folder = path / name
    shutil.copytree(folders / name, folder)
    change(folder)
    return folder


def without_weights(folder):
    (folder / "model.weights.h5").unlink()


def cut_off(folder):
    file = folder / "model_00001.weights.h5"
    file.write_bytes(file.read_bytes()[:-100])


def without_a_shard(folder):
    (folder / "model_00002.weights.h5").unlink()


def of_another_shape(folder):
    with h5py.File(folder / "model.weights.h5", "a") as file:
        name = "layers/llama_layer_norm/vars/0"
        value = file[name][:-1]
        del file[name]
        file[name] = value


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("whole", without_weights, "weights.* doesn't exist"),
        ("shards", cut_off, "must be one that"),
        ("shards", without_a_shard, "model_00002"),
        ("whole", of_another_shape, r"layernorm/scale.*\(16,\).*\(15,\)"),
    ],
)
def test_preset_that_lacks_something_takes_no_memory(
    folders, tmp_path, monkeypatch, name, change, message
):
    created = []
    create = internals.create_variable
    monkeypatch.setattr(
        internals, "create_variable", lambda v: created.append(v) or create(v)
    )
    folder = changed(folders, name, tmp_path, change)
    with pytest.raises(ValueError, match=f"(?s){message}.*No memory") as error:
        load(folder)
    assert str(folder) in str(error.value)
    assert not created


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("GPT2CausalLM", "LlamaBackbone"),
        ("GPT2Backbone", "LlamaBackbone"),
        ("LlamaCausalLMM", "such as 'CausalLM'"),
    ],
)
def test_other_class_is_named(folders, task, message):
    with pytest.raises(ValueError, match=message):
        load(folders / "whole", task)
