"""A `GPipe` of a task of KerasHub takes texts, as the task does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_presets

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")
TEXTS = ["abc de", "x", "hello", "zz top", "ab ab", "the end"]


def compiled(model):
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def both():
    """A task in plain Keras, and a pipeline of the same."""
    task = compiled(tiny_presets.gpt2())
    pipeline = tfgpipe.GPipe(
        tiny_presets.gpt2(), 2, 2, devices=["CPU:1", "CPU:2"]
    )
    return task, compiled(pipeline)


def test_texts_train_and_are_tested_as_in_keras():
    task, pipeline = both()
    data = tf.data.Dataset.from_tensor_slices(TEXTS).batch(3)
    found = []
    for model in (task, pipeline):
        history = model.fit(
            data, epochs=2, validation_data=data, verbose=0, shuffle=False
        ).history
        history["test"] = model.evaluate(data, verbose=0)
        history["fit"] = model.fit(
            TEXTS, batch_size=4, verbose=0, shuffle=False
        ).history["loss"]
        history["batch"] = model.train_on_batch(tf.constant(TEXTS))
        history["batch"] += model.test_on_batch(tf.constant(TEXTS))
        found.append(history)
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, 1e-9)
    for a, b in zip(task.weights, pipeline.model.weights, strict=True):
        np.testing.assert_allclose(a, b.numpy(), 1e-8, 1e-10)


def test_texts_are_predicted_by_the_pipeline():
    task, pipeline = both()
    expected = task.predict(TEXTS, verbose=0)
    for predict in (pipeline.predict, pipeline.model.predict):
        found = predict(TEXTS, verbose=0)
        np.testing.assert_allclose(found, expected, 1e-9)
    found = pipeline.predict_on_batch(tf.constant(TEXTS))
    np.testing.assert_allclose(found, expected, 1e-9)


CPUS = ["CPU:1", "CPU:2"]
LABELS = np.array([0, 1, 2, 1, 0, 2])


def as_made(make):
    """A task as KerasHub has compiled it, and a pipeline of the same."""
    return make(), tfgpipe.GPipe(make(), 2, 2, devices=CPUS)


def check_equal(task, pipeline):
    for a, b in zip(task.weights, pipeline.model.weights, strict=True):
        np.testing.assert_allclose(a, b.numpy(), 1e-8, 1e-10)


def test_task_trains_as_kerashub_has_compiled_it():
    """By its optimizer, loss and metrics, which the user may change."""
    task, pipeline = as_made(tiny_presets.bert)
    found = []
    for model, owner in ((task, task), (pipeline, pipeline.model)):
        owner.optimizer.learning_rate = 0.01
        history = model.fit(
            TEXTS, LABELS, batch_size=3, epochs=2, shuffle=False, verbose=0
        ).history
        history["test"] = model.evaluate(TEXTS, LABELS, verbose=0)
        history["batch"] = model.train_on_batch(tf.constant(TEXTS), LABELS)
        found.append(history)
    assert (
        found[0].keys()
        == found[1].keys()
        > {
            "loss",
            "sparse_categorical_accuracy",
        }
    )
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, 1e-9)
    check_equal(task, pipeline)
    assert pipeline.optimizer is pipeline.model.optimizer
    assert int(pipeline.optimizer.iterations) == 5


def test_who_compiles_last_is_asked():
    """The pipeline's own is above that of the task."""
    _, pipeline = as_made(tiny_presets.bert)
    task = pipeline.model

    def optimizer():
        pipeline.evaluate(TEXTS, LABELS, verbose=0)
        return type(pipeline.optimizer).__name__

    assert optimizer() == "Adam"
    task.compile("sgd")
    assert optimizer() == "SGD"
    own = keras.optimizers.Lion()
    pipeline.compile(own)
    assert optimizer() == "Lion"
    task.compile("rmsprop")
    assert optimizer() == "Lion" and pipeline.optimizer is own
    assert type(task.optimizer) is keras.optimizers.RMSprop


def test_task_that_is_not_compiled_is_not_trained():
    task = tiny_presets.bert()
    pipeline = tfgpipe.GPipe(
        type(task)(
            task.backbone, 3, preprocessor=task.preprocessor, compile=False
        ),
        2,
        devices=CPUS,
    )
    with pytest.raises(ValueError, match="compile"):
        pipeline.fit(TEXTS, LABELS, verbose=0)
    assert pipeline.predict(TEXTS, verbose=0).shape == (6, 3)


def test_pipeline_is_compiled_as_the_task_is():
    """What is not given is the task's choice, and a sampler is the task's."""
    task, pipeline = as_made(tiny_presets.gpt2)
    found = []
    for model in (task, pipeline):
        model.compile(keras.optimizers.SGD(0.5), sampler="greedy")
        history = model.fit(
            TEXTS, batch_size=3, shuffle=False, verbose=0
        ).history
        texts = model.generate(["ab", "hello"], max_length=9)
        found.append((history, texts))
    assert found[0][1] == found[1][1]
    assert found[0][0].keys() == found[1][0].keys()
    for name, values in found[0][0].items():
        np.testing.assert_allclose(found[1][0][name], values, 1e-9)
    check_equal(task, pipeline)


def test_generation_forgets_the_sampler_before():
    task, pipeline = as_made(tiny_presets.gpt2)
    for sampler in ("greedy", "beam"):
        for model in (task, pipeline):
            model.compile(sampler=sampler)
        expected = task.generate(["ab", "hello"], max_length=9)
        assert pipeline.generate(["ab", "hello"], max_length=9) == expected


def files(folder):
    """How to write what was trained, and to read it into a new pipeline."""

    def new():
        return tfgpipe.GPipe(tiny_presets.bert(), 2, 2, devices=CPUS)

    def keras_file(pipeline):
        pipeline.save(folder / "model.keras")
        return tfgpipe.load_model(folder / "model.keras")

    def weights(pipeline):
        pipeline.save_weights(folder / "model.weights.h5")
        found = new()
        found.load_weights(folder / "model.weights.h5")
        return found

    def checkpoint(pipeline):
        found = new()
        tfgpipe.restore(found, folder / "checkpoints")
        return found

    return {"keras": keras_file, "weights": weights, "checkpoint": checkpoint}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras", "weights", "checkpoint"])
def test_training_goes_on_from_files_without_a_compile(tmp_path, name):
    task, pipeline = as_made(tiny_presets.bert)
    task.fit(TEXTS, LABELS, epochs=2, shuffle=False, verbose=0)
    pipeline.fit(
        TEXTS,
        LABELS,
        shuffle=False,
        verbose=0,
        callbacks=[tfgpipe.callbacks.Checkpoint(tmp_path / "checkpoints")],
    )
    again = files(tmp_path)[name](pipeline)
    if name == "keras":  # which has no vocabulary
        again.model.preprocessor = pipeline.model.preprocessor
    again.fit(TEXTS, LABELS, shuffle=False, verbose=0)
    check_equal(task, again)
    assert int(again.optimizer.iterations) == 2


def test_weights_of_a_task_that_was_not_trained_bring_no_slots(tmp_path):
    task, pipeline = as_made(tiny_presets.bert)
    task.save_weights(tmp_path / "task.weights.h5")
    pipeline.load_weights(tmp_path / "task.weights.h5")
    assert not pipeline.compiled and not pipeline.model.optimizer.built
    pipeline.compile("adam")
    pipeline.load_weights(tmp_path / "task.weights.h5")
    assert not pipeline.optimizer.built


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize(
    "max_shard_size", [10, pytest.param(1e-5, marks=pytest.mark.slow)]
)
def test_pipeline_is_saved_to_a_preset(tmp_path, max_shard_size):
    task, pipeline = as_made(tiny_presets.bert)
    for model, name in ((task, "task"), (pipeline, "pipeline")):
        model.fit(TEXTS, LABELS, shuffle=False, verbose=0)
        model.save_to_preset(tmp_path / name, max_shard_size=max_shard_size)
    written = [sorted(p.name for p in d.iterdir()) for d in tmp_path.iterdir()]
    assert written[0] == written[1] and len(written[0]) > 5
    expected = pipeline.predict(TEXTS, verbose=0)
    plain = type(task).from_preset(str(tmp_path / "pipeline"))
    loaded = tfgpipe.load_preset(
        "TextClassifier", tmp_path / "pipeline", 2, devices=CPUS
    )
    for model in (plain, loaded):
        np.testing.assert_allclose(model.predict(TEXTS, verbose=0), expected)
    check_equal(plain, pipeline)
    check_equal(plain, loaded)
    check_equal(task, pipeline)


def test_preset_needs_a_model_of_kerashub(tmp_path):
    pipeline = tfgpipe.GPipe([keras.Input((2,)), keras.layers.Dense(1)], 1)
    with pytest.raises(ValueError, match="`save_to_preset` needs"):
        pipeline.save_to_preset(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="`preset_dir` must be a path"):
        pipeline.save_to_preset(None)


def test_tokens_are_taken_without_a_preprocessor():
    task, pipeline = both()
    x, y, weight = task.preprocessor(TEXTS)
    expected = task.evaluate(TEXTS, verbose=0)
    pipeline.model.preprocessor = None
    found = pipeline.evaluate(x, y, sample_weight=weight, verbose=0)
    np.testing.assert_allclose(found, expected, 1e-9)
    assert pipeline.fit.__doc__ == keras.Model.fit.__doc__
