"""Strings in two languages: what a translation model reads and writes."""

import keras
import numpy as np
import pytest
import texts

from params.pairs import Pairs
from params.task import Translation
from params.tokenizer import BOS_ID, EOS_ID, PAD_ID

SETTINGS = {"vocab_size": 320, "widths": (16, 32, 64)}


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(autouse=True)
def little(monkeypatch, cache_dir):
    texts.use(monkeypatch, cache_dir)


def make(**given):
    return Pairs(**{**SETTINGS, **given}).source()


def batches(source, batch_size=128, **given):
    given = {
        "seed": 0,
        "first_step": 0,
        "num_steps": source.steps_per_epoch(batch_size),
        **given,
    }
    return [
        keras.tree.map_structure(np.asarray, element)
        for element in source.train(batch_size, **given)
    ]


def written(source, element):
    """Texts of the source and target rows that count."""
    (read, _), target, weights = element
    rows = weights.max(axis=1) > 0
    return list(
        zip(
            source.tokenizer.decode(read[rows].tolist()),
            source.decode(target[rows]),
        )
    )


def test_epoch_has_every_training_pair_once():
    source = make(widths=(16, 64, 256))
    found = [
        text
        for element in batches(source, 512)
        for text in written(source, element)
    ]
    expected = [(p.translation, p.english) for p in source.examples("train")]
    assert sorted(found) == sorted(expected)


def test_model_reads_language_tokens_and_the_end():
    source = make()
    (row,) = source.encode(["kalo"], "bb").tolist()
    ids = [i for i in row if i != PAD_ID]
    symbol = source.tokenizer.symbol_id
    assert ids[:2] == [symbol("<2en>"), symbol("<bb>")]
    assert ids[-1] == EOS_ID
    assert len(row) == source.max_length == 64
    assert source.decode([ids]) == ["kalo"]


def test_targets_are_shifted_by_one():
    for (_, shifted), target, weights in batches(make()):
        assert (shifted[:, 0] == BOS_ID).all()
        is_token = target != PAD_ID
        assert ((shifted != PAD_ID) == is_token).all()
        np.testing.assert_array_equal(
            shifted[:, 1:][is_token[:, 1:]], target[:, :-1][is_token[:, 1:]]
        )
        counts = is_token.sum(axis=1)
        ends = target[np.arange(len(target)), counts - 1]
        assert (ends == EOS_ID).all()
        assert set(np.unique(weights)) <= {0, target.shape[1]}
        assert (weights[is_token.any(axis=1)] > 0).any()


@pytest.mark.parametrize("target_widths", [None, (16, 16, 64)])
def test_evaluation_has_every_test_pair_once(target_widths):
    source = make(widths=(16, 64, 256), target_widths=target_widths)
    found = []
    for element in source.evaluation(512):
        element = keras.tree.map_structure(np.asarray, element)
        found += written(source, element)
    expected = [(p.translation, p.english) for p in source.examples("test")]
    assert sorted(found) == sorted(expected)


def test_every_token_counts_the_same_whatever_its_batch():
    source = make()
    vocab_size = SETTINGS["vocab_size"]

    class ByTarget(keras.layers.Layer):
        """A loss that differs from token to token."""

        def call(self, inputs):
            _, shifted = inputs
            logits = keras.ops.one_hot(shifted, vocab_size)
            scale = keras.ops.cast(shifted % 7, "float32")
            return logits * scale[..., None]

    task = Translation(label_smoothing=0.0)
    inputs = tuple(keras.Input((None,), dtype="int32") for _ in range(2))
    model = keras.Model(inputs, ByTarget()(inputs))
    model.compile("sgd", **task.compile_arguments())
    logs = model.evaluate(source.evaluation(128), verbose=0, return_dict=True)
    total = count = 0.0
    for (_, shifted), target, weights in source.evaluation(128):
        nll = keras.losses.sparse_categorical_crossentropy(
            target, ByTarget()((None, shifted)), from_logits=True
        )
        counts = weights.numpy() > 0
        total += nll.numpy()[counts].sum()
        count += counts.sum()
    assert logs["nll"] == pytest.approx(total / count, rel=1e-5)
    assert task.results(logs, source)["nll"] == logs["nll"]


def test_language_the_model_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="Did you mean 'aa'"):
        make().encode(["x"], "aaa")
    with pytest.raises(ValueError, match="Did you mean 'test'"):
        make().examples("tests")
