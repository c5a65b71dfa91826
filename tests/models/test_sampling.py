"""Generated text is what the model says, though it is computed with a cache."""

import keras
import numpy as np
import pytest
from stacks import VOCABULARY, build, call, tiny, tokens

import tfgpipe
from models import decoding, sampling


def model(num_layers=1, **kwargs):
    """Layers with weights that make up their mind."""
    layers = tiny(num_layers, max_length=16, **kwargs)
    build(layers, (None, 16))
    rng = np.random.default_rng(3)
    for layer in layers:
        for weight in layer.trainable_weights:
            if len(weight.shape) > 1:
                weight.assign(rng.standard_normal(weight.shape))
    return layers


def always(logits):
    """Layers whose logits are the same whatever the tokens are."""
    layers = model()
    dense = layers[-1].dense
    dense.set_weights([np.zeros(dense.kernel.shape), np.asarray(logits)])
    return layers


@pytest.mark.usefixtures("float64")
def test_greedy_tokens_are_those_of_the_whole_sequence_without_a_cache():
    layers = model()
    prompt = tokens(3, 4)
    found = sampling.generate(layers, prompt, 8, temperature=0.0)
    ids = prompt
    for _ in range(8):
        best = np.argmax(call(layers, ids)[:, -1], axis=-1)
        ids = np.concatenate([ids, best[:, None]], axis=1)
    np.testing.assert_array_equal(found, ids)
    assert found.dtype == np.int32
    assert len({tuple(row) for row in ids[:, 4:]}) > 1


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, 4)])
def test_tokens_are_drawn_as_often_as_the_softmax_says(temperature, top_k):
    logits = np.linspace(-1, 1, VOCABULARY)
    found = sampling.generate(
        always(logits),
        np.zeros((400, 1), int),
        15,
        temperature=temperature,
        top_k=top_k,
    )[:, 1:]
    shares = np.exp(logits / temperature)
    shares[: VOCABULARY - (top_k or VOCABULARY)] = 0
    shares /= shares.sum()
    seen = np.bincount(found.ravel(), minlength=VOCABULARY) / found.size
    # Six standard deviations of a share of 6000 draws.
    np.testing.assert_allclose(seen, shares, atol=6 * 0.5 / np.sqrt(6000))
    assert (seen[shares == 0] == 0).all()


def in_groups(monkeypatch, num_groups):
    """Rows go through in so many groups, whatever the devices are."""
    monkeypatch.setattr(decoding, "num_devices", lambda layers: num_groups)


def pipeline_of(layers, k):
    inputs = keras.Input((16,), dtype="int32")
    devices = [f"CPU:{index}" for index in range(2, 2 + k)]
    return tfgpipe.GPipe([inputs, *layers], devices=devices)


def test_tokens_depend_neither_on_cells_nor_on_groups(monkeypatch):
    layers = model(num_layers=3, dropout=0.5)
    prompt = tokens(5, 4)
    expected = sampling.generate(layers, prompt, 8)
    assert len({tuple(row) for row in expected[:, 4:]}) == 5
    for k in (1, 2):
        pipeline = pipeline_of(layers, k)
        for num_groups in (1, 2, 3):
            in_groups(monkeypatch, num_groups)
            found = sampling.generate(pipeline.layers, prompt, 8)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": -1}, "`num_tokens` must not be negative"),
        ({"num_tokens": 12}, r"at most 16\. Received: 18 with the prompt"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"top_k": 0}, "Pass None to draw from all"),
        ({"prompt": np.zeros((0, 3), int)}, r"`prompt`.*\(0, 3\)"),
        ({"prompt": np.zeros(3, int)}, r"`prompt`.*shape \(3,\)"),
        ({"prompt": np.zeros((1, 3))}, r"`prompt`.*of float64"),
        ({"layers": [keras.layers.Dense(3)]}, r"\['Dense'\].*model\.layers"),
        ({"layers": tiny()}, "not built: .*embedding"),
    ],
)
def test_bad_argument_is_an_error_with_the_cure(arguments, message):
    arguments = {"prompt": tokens(), "num_tokens": 3, **arguments}
    layers = arguments.pop("layers", None) or model()
    with pytest.raises(ValueError, match=message):
        sampling.generate(layers, **arguments)
