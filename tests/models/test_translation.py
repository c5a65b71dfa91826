"""Encoder-decoders: sizes, what a position sees, padding, training."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from kinds import Plain
from stacks import call, count, no_weights_allocated
from tiny import assert_close

import tfgpipe
from models import translation
from models.losses import SmoothedCrossentropy

VOCABULARY = 12
BEGIN = 1


def tiny(num_layers=2, **kwargs):
    kwargs = {"max_length": 8, "head_dim": 3, **kwargs}
    return translation.translation(num_layers, 8, 16, 2, VOCABULARY, **kwargs)


def padded(lengths, width, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(2, VOCABULARY, (len(lengths), width))
    return np.where(np.arange(width) < np.array(lengths)[:, None], ids, 0)


def pairs():
    """Source, target that begins with `BEGIN`, labels, weights; six rows."""
    source = padded([5, 3, 4, 1, 2, 5], 5, seed=0)
    labels = padded([2, 4, 4, 3, 1, 4], 4, seed=1)
    begin = np.full((6, 1), BEGIN)
    target = np.concatenate([begin, labels[:, :-1]], axis=1)
    target = np.where(labels > 0, target, 0)
    weights = (labels > 0).astype("float64")
    return *(a.astype("int32") for a in (source, target, labels)), weights


# --------------------------------------------------------------------- sizes
def parameters(num_layers, hidden_dim, num_heads):
    """Parameters of T(L, H, A), from a model of one layer, not allocated."""
    with no_weights_allocated():
        layers = translation.translation(
            1, 1024, hidden_dim, num_heads, 64_000, max_length=1024
        )
        spec = keras.KerasTensor((None, 64), "int32")
        x = spec, spec
        for layer in layers:
            x = layer(x)
    assert x.shape == (None, 64, 64_000)
    assert all(w._value is None for la in layers for w in la.weights)
    embedding, encoder, norm, decoder, logits = (
        count(layer.trainable_weights) for layer in layers
    )
    return embedding + norm + logits + num_layers * (encoder + decoder)


@pytest.mark.parametrize(
    ("size", "expected", "paper"),
    [
        ((6, 8192, 16), 408_209_920, 400e6),
        ((24, 8192, 16), 1_239_419_392, 1.3e9),
        ((12, 16384, 32), 1_239_235_072, 1.3e9),
        ((32, 16384, 32), 3_086_060_032, 3e9),
        ((64, 16384, 32), 6_040_979_968, 6e9),
    ],
)
def test_parameters_of_section_5_models_are_near_the_papers(
    size, expected, paper
):
    assert parameters(*size) == expected
    assert abs(expected / paper - 1) < 0.05


# ------------------------------------------------------------- what it does


@pytest.mark.usefixtures("float64")
def test_padding_changes_nothing_elsewhere():
    layers = tiny()
    source, target, *_ = pairs()
    logits = call(layers, (source, target))
    wider = [np.pad(ids, ((0, 0), (0, 3))) for ids in (source, target)]
    found = call(layers, tuple(wider))[:, :4]
    visible = target > 0
    np.testing.assert_allclose(
        found[visible], logits[visible], rtol=1e-9, atol=1e-12
    )
    alone = call(layers, (source[1:2, :3], target[1:2, :4]))
    np.testing.assert_allclose(alone, logits[1:2], rtol=1e-9, atol=1e-12)


def changed(ids, column):
    ids = ids.copy()
    ids[:, column] = ids[:, column] % (VOCABULARY - 2) + 2
    return ids


@pytest.mark.usefixtures("float64")
def test_target_position_sees_the_source_and_nothing_later():
    layers = tiny()
    source, target = padded([5] * 3, 5, 0), padded([4] * 3, 4, 1)
    logits = np.asarray(call(layers, (source, target)))
    later = np.asarray(call(layers, (source, changed(target, 2))))
    np.testing.assert_allclose(later[:, :2], logits[:, :2], rtol=1e-12)
    assert (np.abs(later - logits)[:, 2:].max(axis=-1) > 1e-6).all()
    other = np.asarray(call(layers, (changed(source, 4), target)))
    assert (np.abs(other - logits).max(axis=-1) > 1e-6).all()


# ---------------------------------------------------------------- a pipeline
def batches():
    source, target, labels, weights = pairs()
    data = (source, target), labels, weights
    data = tf.data.Dataset.from_tensor_slices(data)
    return data.batch(3, drop_remainder=True)


def train(make, dropout=0.0, **kwargs):
    """Trains for two epochs of two steps; returns losses and weights."""
    keras.utils.set_random_seed(5)
    model = make(tiny(num_layers=1, dropout=dropout))
    model.compile(
        keras.optimizers.SGD(0.3, momentum=0.9),
        SmoothedCrossentropy(label_smoothing=0.1),
        **kwargs,
    )
    history = model.fit(batches(), epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], [w.numpy() for w in model.weights]


def two_cells(layers):
    return tfgpipe.GPipe(layers, 2, 2, layers_per_cell=[2, 3])


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_training_by_a_pipeline_equals_a_loop_of_layers():
    losses, weights = train(two_cells)
    expected = train(Plain, run_eagerly=True)
    assert_close((losses, weights), expected)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_pipeline_predicts_what_a_loop_of_layers_does(policy):
    keras.config.set_dtype_policy(policy)
    layers = tiny(num_layers=1)
    x = pairs()[:2]
    expected = call(layers, x)
    model = two_cells(layers)
    found = model.predict(x, batch_size=6, verbose=0)
    tolerance = 1e-5 if policy == "float32" else 0.02
    np.testing.assert_allclose(
        found.astype("float32"),
        keras.ops.cast(expected, "float32"),
        rtol=tolerance,
        atol=tolerance,
    )
