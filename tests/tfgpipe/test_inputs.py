"""Data of other shapes than the model was built for; and its rows, split."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.inputs import MicroBatches, batch_dimension


def chain(k=2, **kwargs):
    layers = [keras.Input((4, 6), name="rows"), kl.Dense(4), kl.Dense(4)]
    return tfgpipe.GPipe(layers, k, 2, **kwargs)


def functional():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    h = keras.ops.concatenate([a, b], axis=-1)
    return tfgpipe.GPipe(keras.Model([a, b], kl.Dense(2)(h)), 2, 2)


def refused(call, expected, received):
    words = f"`x` must have the shape {expected}. Received: {received}."
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_other_rank_is_refused():
    model = chain(1)
    x = np.ones((6, 4, 6, 2), "float32")
    refused(
        lambda: model.predict(x),
        "(None, 4, 6) of the input 'rows'",
        "(6, 4, 6, 2)",
    )


def test_sizes_that_layers_take_are_theirs_as_in_keras():
    """A `keras.Sequential` does not compare sizes."""
    layers = [keras.Input((4, 6)), kl.Dense(3, kernel_initializer="ones")]
    x = np.random.default_rng(0).random((6, 9, 6), "float32")
    model = tfgpipe.GPipe([*layers, kl.GlobalMaxPool1D()], 2, 2)
    plain = keras.Sequential([*layers, kl.GlobalMaxPool1D()])
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, plain.predict(x, verbose=0), 1e-6)


@pytest.mark.parametrize("kind", [list, dict])
def test_input_of_a_functional_model_is_named(kind):
    model = functional()
    model.compile("sgd", "mse")
    x = {"a": np.ones((6, 4)), "b": np.ones((6, 5))}
    if kind is list:
        x = [*x.values()]
    refused(
        lambda: model.predict(x, verbose=0),
        "(None, 4) of the input 'b'",
        "(6, 5)",
    )


# ---------------------------------------------------------------- micro-batches
SIZES = [(n, m) for n in (1, 2, 3, 7, 8, 19) for m in (1, 2, 3, 4, 8)]


def dynamic(function, x):
    """Runs with the number of rows unknown while tracing."""
    spec = tf.TensorSpec([None, *x.shape[1:]], x.dtype)
    return tf.function(function, input_signature=[spec])(x)


def rows(n):
    return tf.reshape(tf.range(2.0 * n), [n, 2])


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_split_of_a_known_batch_drops_and_repeats_nothing(n, m):
    micro_batches = MicroBatches(rows(n), m)
    parts = micro_batches.split(rows(n))
    sizes = [len(part) for part in parts]
    assert len(parts) == micro_batches.count == min(n, m)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [micro_batches.size(i) for i in range(len(parts))]
    np.testing.assert_array_equal(np.concatenate(parts), rows(n))
    np.testing.assert_array_equal(micro_batches.join(parts), rows(n))


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_split_of_an_unknown_batch_gives_the_same_rows(n, m):
    def function(x):
        micro_batches = MicroBatches(x, m)
        parts = micro_batches.split(x)
        sizes = tf.stack([micro_batches.size(i) for i in range(m)])
        kept = [p[: micro_batches.size(i)] for i, p in enumerate(parts)]
        counts = tf.stack([tf.shape(p)[0] for p in parts])
        ranks = tf.stack([micro_batches.rank(i) for i in range(m + 1)])
        fractions = [micro_batches.fraction(i, "float64") for i in range(m)]
        joined = micro_batches.join(parts)
        return sizes, tf.concat(kept, 0), counts, ranks, fractions, joined

    sizes, kept, counts, ranks, fractions, joined = dynamic(function, rows(n))
    np.testing.assert_array_equal(kept, rows(n))
    np.testing.assert_array_equal(joined, rows(n))
    assert counts.numpy().min() >= 1  # kernels abort on none
    assert sum(sizes.numpy()) == n
    assert np.sum(fractions) == pytest.approx(1)
    filled = np.cumsum(np.minimum(sizes, 1))
    np.testing.assert_array_equal(ranks, [0, *filled])


def test_batch_without_rows_at_run_time_is_refused():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="at least one row"
    ):
        dynamic(lambda x: MicroBatches(x, 2).num_rows, tf.zeros([0, 2]))


@pytest.mark.parametrize(
    ("nest", "message"),
    [
        (tf.zeros([0, 2]), "at least one row"),
        (tf.zeros([]), r"shape \(batch, ...\)"),
        (tf.sparse.eye(3), "to_dense"),
        (tf.ragged.constant([[1], [2, 3]]), "to_tensor"),
    ],
)
def test_batch_dimension_of_bad_input_names_the_cure(nest, message):
    with pytest.raises(ValueError, match=message):
        batch_dimension(nest, "x")
