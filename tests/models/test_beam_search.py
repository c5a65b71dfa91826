"""Beam search finds what it says it does, beside searches without a cache."""

import functools

import keras
import numpy as np
import pytest
from stacks import call

import tfgpipe
from models import decoding, translation
from models.beam_search import BeamSearch

BEGIN, END, VOCABULARY, LENGTH = 1, 2, 5, 4
IDS = {"bos_id": BEGIN, "eos_id": END, "max_length": LENGTH}
SOURCES = np.array([[3, 4, 2, 0], [4, 4, 3, 2], [3, 0, 0, 0]])


def model(dtype, num_layers=1):
    """Layers with weights that make up their mind."""
    layers = translation.translation(
        num_layers, 8, 16, 2, VOCABULARY, max_length=6, head_dim=4, dropout=0.3
    )
    layers = [
        type(layer).from_config({**layer.get_config(), "dtype": dtype})
        for layer in layers
    ]
    call(layers, (SOURCES, SOURCES))
    rng = np.random.default_rng(3)  # with which searches differ, see below
    for layer in layers:
        scale = 0.5 if layer is layers[-1] else 0.8
        for weight in layer.trainable_weights:
            if len(weight.shape) > 1:
                weight.assign(scale * rng.standard_normal(weight.shape))
    return layers


@functools.cache
def exact_model():
    """The same layers for all tests, which do not change them."""
    return model("float64")


@functools.cache
def searcher(size, exponent):
    """Made once: what it does first is traced."""
    return BeamSearch(
        exact_model(), beam_size=size, length_penalty=exponent, **IDS
    )


def log_probs(source, prefixes):
    """Log-probabilities of the token after each prefix, by whole calls."""
    width = max(map(len, prefixes)) + 1
    target = np.zeros((len(prefixes), width), int)
    target[:, 0] = BEGIN
    for row, prefix in zip(target, prefixes, strict=True):
        row[1 : 1 + len(prefix)] = prefix
    sources = np.repeat(source[None], len(prefixes), axis=0)
    found = keras.ops.log_softmax(call(exact_model(), (sources, target)))
    rows = np.arange(len(prefixes))
    return np.asarray(found)[rows, [len(prefix) for prefix in prefixes]]


def penalty(length, exponent):
    return ((5 + length) / 6) ** exponent


def is_whole(tokens):
    return len(tokens) == LENGTH or tokens[-1:] == (END,)


def padded(tokens):
    return [*tokens, *[0] * (LENGTH - len(tokens))]


def beam(source, size, exponent):
    """The search that the module describes, in plain words."""
    hypotheses, beginnings = [], [((), 0.0)]
    for length in range(1, LENGTH + 1):
        after = log_probs(source, [tokens for tokens, _ in beginnings])
        extended = [
            ((*tokens, token), score + row[token])
            for (tokens, score), row in zip(beginnings, after, strict=True)
            for token in range(1, VOCABULARY)
        ]
        extended.sort(key=lambda pair: -pair[1])
        hypotheses += [
            (tokens, score / penalty(length, exponent))
            for tokens, score in extended[:size]
            if is_whole(tokens)
        ]
        going_on = [pair for pair in extended if not is_whole(pair[0])]
        beginnings = going_on[:size]
        best = max((s for _, s in hypotheses), default=-np.inf)
        if len(hypotheses) >= size or not beginnings:
            break
        if beginnings[0][1] / penalty(LENGTH, exponent) <= best:
            break
    return max(hypotheses, key=lambda pair: pair[1])


def assert_found(found, reference):
    """The results are those of a function of one sentence."""
    for source, ids, score in zip(SOURCES, *found, strict=True):
        tokens, expected = reference(source)
        assert ids.tolist() == padded(tokens)
        np.testing.assert_allclose(score, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("size", "exponent"), [(1, 3.0), (2, 0.0), (4**LENGTH, 3.0)]
)
def test_narrow_beam_follows_the_description(size, exponent):
    found = searcher(size, exponent)(SOURCES)
    assert_found(found, lambda source: beam(source, size, exponent))


def test_sentence_is_translated_alike_alone_and_without_padding():
    together = searcher(2, 0.0)(SOURCES)
    for i, length in enumerate([3, 4, 1]):
        alone = searcher(2, 0.0)(SOURCES[i : i + 1, :length])
        np.testing.assert_array_equal(alone.ids[0], together.ids[i])
        np.testing.assert_allclose(alone.scores[0], together.scores[i])


def pipeline_of(layers):
    pipeline = tfgpipe.GPipe(layers, devices=["CPU:2", "CPU:3"])
    pipeline.build(((None, 4), (None, 4)))
    return pipeline


@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_layers_of_a_pipeline_translate_in_groups(num_groups, monkeypatch):
    monkeypatch.setattr(decoding, "num_devices", lambda layers: num_groups)
    layers = pipeline_of(model("float64")).layers
    search = BeamSearch(layers, beam_size=2, length_penalty=0.0, **IDS)
    for _ in range(2):  # the second one finds no caches of the first
        assert_found(search(SOURCES), lambda source: beam(source, 2, 0.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bos_id": 0}, "`bos_id` must be a token id, from 1 to 4"),
        ({"eos_id": 5}, "eos_id=5"),
        ({"max_length": 7}, "that of the model, 6.*max_length=7"),
        ({"beam_size": 0}, "`beam_size` must be positive"),
        ({"length_penalty": -1.0}, "`length_penalty` must not be negative"),
    ],
)
def test_bad_argument_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(exact_model(), **{**IDS, **arguments})
