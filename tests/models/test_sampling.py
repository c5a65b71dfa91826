"""Generated text is what the model says, though it is computed with a cache."""

import keras
import numpy as np
import pytest
from stacks import VOCABULARY, build, call, tiny, tokens

import tfgpipe
from models import sampling


def model(**kwargs):
    """Layers with weights that make up their mind."""
    layers = tiny(num_layers=1, max_length=16, **kwargs)
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


def test_one_candidate_is_greedy():
    layers = model()
    greedy = sampling.generate(layers, tokens(), 8, temperature=0.0)
    found = sampling.generate(layers, tokens(), 8, temperature=2.0, top_k=1)
    np.testing.assert_array_equal(found, greedy)


def test_tokens_follow_from_the_seed():
    layers = model()

    def draw(seed):
        return sampling.generate(layers, tokens(), 10, seed=seed)

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()


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


def test_no_tokens_return_the_prompt():
    np.testing.assert_array_equal(
        sampling.generate(model(), tokens(), 0), tokens()
    )


def test_layers_of_a_pipeline_generate_where_they_are():
    layers = model(dropout=0.5)
    expected = sampling.generate(layers, tokens(), 6)
    pipeline = tfgpipe.GPipe(
        [keras.Input((16,), dtype="int32"), *layers], devices=["CPU:2", "CPU:3"]
    )
    found = sampling.generate(pipeline.layers, tokens(), 6)
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
