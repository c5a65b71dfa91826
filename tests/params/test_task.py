"""Tasks: what is learnt, and how its result is told."""

import math

import keras
import numpy as np
import pytest

from params.task import Classification, LanguageModel, Translation


class Words:
    num_test_tokens = 30
    num_test_words = 10


def test_classification_tells_the_accuracy():
    task = Classification()
    results = task.results({"accuracy": 0.8625, "loss": 1.0}, None)
    assert results == {"accuracy": 0.8625}
    assert task.summary(results) == "Test accuracy: 86.25%"


def test_language_model_tells_the_perplexity_of_words():
    task = LanguageModel()
    results = task.results({"nll": math.log(2), "loss": 9.0}, Words())
    assert results["perplexity"] == pytest.approx(2)
    assert results["word_perplexity"] == pytest.approx(8)
    assert task.summary(results) == (
        "Test perplexity: 8.0 a word (2.00 a token)"
    )


def test_translation_tells_the_likelihood():
    task = Translation()
    results = task.results({"nll": math.log(2), "loss": 9.0}, None)
    assert task.summary(results) == "Test NLL: 0.693 a token (perplexity 2.00)"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cls", [LanguageModel, Translation])
def test_loss_is_smoothed_and_nll_is_not(cls, smoothing):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 3, 7)).astype("float32")
    labels = rng.integers(0, 7, (4, 3), np.int32)
    weights = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]], "float32")
    model = keras.Sequential([keras.Input((3, 7)), keras.layers.Identity()])
    model.compile("sgd", **cls(smoothing).compile_arguments())
    logs = model.test_on_batch(
        logits, labels, sample_weight=weights, return_dict=True
    )
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    smooth = (1 - smoothing) * nll - smoothing * log_p.mean(-1)
    total = weights.sum()
    assert logs["nll"] == pytest.approx((nll * weights).sum() / total, rel=1e-5)
    assert logs["loss"] == pytest.approx(
        (smooth * weights).sum() / total, rel=1e-5
    )
