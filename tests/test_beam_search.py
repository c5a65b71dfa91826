"""Beam search finds what it says it does, beside searches without a cache."""

import itertools

import keras
import numpy as np
import pytest
from test_amoebanet import call

import tfgpipe
from models import translation
from models.beam_search import BeamSearch

BEGIN, END, VOCABULARY, LENGTH = 1, 2, 5, 4
SOURCES = np.array([[3, 4, 2, 0], [4, 4, 3, 2], [3, 0, 0, 0]])


def model():
    """Layers with weights that make up their mind."""
    layers = translation.translation(
        2, 8, 16, 2, VOCABULARY, max_length=6, head_dim=4, dropout=0.3
    )
    call(layers, (SOURCES, SOURCES))
    rng = np.random.default_rng(1)
    for layer in layers:
        layer.set_weights(
            [0.6 * rng.standard_normal(w.shape) for w in layer.get_weights()]
        )
    # So that sentences do not all end at once, or never.
    layers[-1].logits.dense.bias.assign([3.0, 0.0, 1.0, 0.0, 0.0])
    return layers


def log_probs(layers, source, prefixes):
    """Log-probabilities of the token after each prefix, by whole calls."""
    width = max(map(len, prefixes)) + 1
    target = np.zeros((len(prefixes), width), int)
    target[:, 0] = BEGIN
    for row, prefix in zip(target, prefixes, strict=True):
        row[1 : 1 + len(prefix)] = prefix
    sources = np.repeat(source[None], len(prefixes), axis=0)
    found = keras.ops.log_softmax(call(layers, (sources, target)))
    rows = np.arange(len(prefixes))
    return np.asarray(found)[rows, [len(prefix) for prefix in prefixes]]


def penalty(length, exponent):
    return ((5 + length) / 6) ** exponent


def is_whole(tokens):
    return len(tokens) == LENGTH or tokens[-1:] == (END,)


def padded(tokens):
    return [*tokens, *[0] * (LENGTH - len(tokens))]


def exhaustive(layers, source, exponent):
    """The best of all hypotheses, and its score."""
    best = (), -np.inf
    beginnings = {(): 0.0}
    while beginnings:
        after = log_probs(layers, source, list(beginnings))
        extended = {
            (*tokens, token): score + row[token]
            for (tokens, score), row in zip(
                beginnings.items(), after, strict=True
            )
            for token in range(1, VOCABULARY)
        }
        for tokens, score in extended.items():
            score = score / penalty(len(tokens), exponent)
            if is_whole(tokens) and score > best[1]:
                best = tokens, score
        beginnings = {t: s for t, s in extended.items() if not is_whole(t)}
    return best


def beam(layers, source, exponent, size):
    """The search that the module describes, in plain words."""
    hypotheses, beginnings = [], [((), 0.0)]
    for length in range(1, LENGTH + 1):
        after = log_probs(layers, source, [tokens for tokens, _ in beginnings])
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


def search(layers, size, exponent=0.6, sources=SOURCES):
    return BeamSearch(
        layers,
        bos_id=BEGIN,
        eos_id=END,
        max_length=LENGTH,
        beam_size=size,
        length_penalty=exponent,
    )(sources)


@pytest.fixture
def layers(float64):
    return model()


@pytest.mark.parametrize("exponent", [0.0, 0.6, 3.0])
def test_beam_of_all_beginnings_finds_the_best_hypothesis(layers, exponent):
    found = search(layers, 4**LENGTH, exponent)
    for source, ids, score in zip(SOURCES, *found, strict=True):
        tokens, best = exhaustive(layers, source, exponent)
        assert ids.tolist() == padded(tokens)
        np.testing.assert_allclose(score, best, rtol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_narrow_beam_follows_the_description(layers, size, exponent):
    found = search(layers, size, exponent)
    for source, ids, score in zip(SOURCES, *found, strict=True):
        tokens, best = beam(layers, source, exponent, size)
        assert ids.tolist() == padded(tokens)
        np.testing.assert_allclose(score, best, rtol=1e-9)


def test_beam_of_one_takes_the_most_probable_token_each_time(layers):
    found = search(layers, 1)
    for source, ids in zip(SOURCES, found.ids, strict=True):
        tokens = ()
        while not is_whole(tokens):
            after = log_probs(layers, source, [tokens])[0]
            tokens = (*tokens, 1 + int(np.argmax(after[1:])))
        assert ids.tolist() == padded(tokens)


def test_models_of_these_tests_tell_searches_apart(layers):
    results = [search(layers, size, e) for size in (1, 64) for e in (0.0, 3.0)]
    ids = [r.ids for r in results]
    assert all((a != b).any() for a, b in itertools.combinations(ids, 2))
    lengths = {int((row > 0).sum()) for r in ids for row in r}
    assert len(lengths) > 1


def test_sentence_is_translated_alike_alone_and_without_padding(layers):
    together = search(layers, 3)
    for i, length in enumerate([3, 4, 1]):
        alone = search(layers, 3, sources=SOURCES[i : i + 1, :length])
        np.testing.assert_array_equal(alone.ids[0], together.ids[i])
        np.testing.assert_allclose(alone.scores[0], together.scores[i])


def test_one_search_translates_several_batches_with_the_weights_of_the_day():
    layers = model()
    searcher = BeamSearch(layers, bos_id=BEGIN, eos_id=END, max_length=LENGTH)
    before = searcher(SOURCES)
    assert len(searcher(SOURCES[:1, :2]).ids) == 1
    np.testing.assert_array_equal(searcher(SOURCES).ids, before.ids)
    layers[-1].logits.dense.bias.assign([0.0, 0.0, 50.0, 0.0, 0.0])
    found = searcher(SOURCES)
    assert found.ids.tolist() == [padded((END,))] * 3
    np.testing.assert_allclose(found.scores, 0.0, atol=1e-6)


def test_padding_is_never_produced():
    layers = model()
    layers[-1].logits.dense.bias.assign([50.0, 0.0, -50.0, 0.0, 0.0])
    assert (search(layers, 3).ids > 0).all()


def test_layers_of_a_pipeline_translate_where_they_are():
    layers = model()
    expected = search(layers, 2)
    pipeline = tfgpipe.GPipe(layers, devices=["CPU:2", "CPU:3"])
    pipeline.build(((None, 4), (None, 4)))
    found = search(pipeline.layers, 2)
    np.testing.assert_array_equal(found.ids, expected.ids)


GOOD = {"bos_id": BEGIN, "eos_id": END, "max_length": LENGTH}


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
        BeamSearch(model(), **{**GOOD, **arguments})


@pytest.mark.parametrize("count", [0, 1, 5])
def test_layers_of_something_else_are_an_error(count):
    layers = [keras.layers.Dense(3) for _ in range(count)]
    with pytest.raises(ValueError, match=r"translation\.translation"):
        BeamSearch(layers, **GOOD)


@pytest.mark.parametrize("ids", [[3, 4], [[3.0]], [[]]])
def test_sources_that_are_no_batch_of_ids_are_an_error(ids):
    searcher = BeamSearch(model(), **GOOD)
    with pytest.raises(ValueError, match="`source_ids` must be integers"):
        searcher(ids)
