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


def test_tokens_are_taken_without_a_preprocessor():
    task, pipeline = both()
    x, y, weight = task.preprocessor(TEXTS)
    expected = task.evaluate(TEXTS, verbose=0)
    pipeline.model.preprocessor = None
    found = pipeline.evaluate(x, y, sample_weight=weight, verbose=0)
    np.testing.assert_allclose(found, expected, 1e-9)
    assert pipeline.fit.__doc__ == keras.Model.fit.__doc__
