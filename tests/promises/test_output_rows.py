"""Outputs of a functional model have a row for each row of the batch."""

import keras
import pytest
from keras import layers as kl
from keras import ops

import tfgpipe


def similarities(*length):
    """Logits of all rows with all rows, as CLIP's."""
    a, b = keras.Input((*length, 3), name="a"), keras.Input((3,), name="b")
    image = kl.Dense(4)(ops.mean(a, 1) if length else a)
    text = kl.Dense(4)(b)
    logits = ops.matmul(image, ops.transpose(text))
    return [a, b], logits, [kl.Dense(2)(image)]


def queue():
    """One similarity more."""
    inputs, logits, _ = similarities()
    return inputs, ops.concatenate([logits[:, :1], logits], -1)


def flat():
    inputs, logits, _ = similarities()
    return inputs, ops.reshape(logits, (-1,))


def across():
    inputs, _, (rows,) = similarities()
    return inputs, ops.transpose(rows)


def of_all():
    inputs, _, (rows,) = similarities()
    return inputs, ops.sum(rows, 0, keepdims=True)


def inside():
    """In a model inside, with sequences of any length."""
    inputs, logits, rows = similarities(None)
    inner = keras.Model(inputs, [*rows, logits])
    x = [keras.Input(t.shape[1:]) for t in inputs]
    return x, inner(x)


@pytest.mark.parametrize("make", [queue, flat, across, of_all, inside])
def test_outputs_that_are_not_one_a_row_are_refused(make):
    model = keras.Model(*make())
    names = r"row for each row.*output .*of shape "
    with pytest.raises(ValueError, match=names):
        tfgpipe.GPipe(model, 2, 2)
    tfgpipe.GPipe(model, 2, 1)


def test_the_output_that_is_wrong_is_named():
    inputs, logits, rows = similarities()
    model = keras.Model(inputs, {"rows": rows[0], "logits": logits})
    for m in (2, 8):
        with pytest.raises(
            ValueError, match=r"output 'logits' of .*'matmul"
        ) as e:
            tfgpipe.GPipe(model, 1, m)
        assert "'rows'" not in str(e.value)


def time_first():
    """Rows are the second axis for a while."""
    x = keras.Input((5, 3))
    h = ops.transpose(x, (1, 0, 2)) * ops.ones((5, 1, 1))
    return x, ops.transpose(h, (1, 0, 2))


def any_length():
    x = keras.Input((None, 3))
    return x, ops.concatenate([kl.Dense(3)(x), x], 1)


def prime():
    """An axis as long as the batch that is asked about."""
    x = keras.Input((7919, 1))
    return x, ops.reshape(kl.Dense(2)(x), (-1, 2 * 7919))


def folded():
    x = keras.Input((5, 3))
    h = kl.Dense(2)(ops.reshape(x, (-1, 3)))
    return x, ops.reshape(h, (-1, 5, 2))


def own_similarities():
    """Of all positions of a row with each other."""
    x = keras.Input((None, 3))
    return x, ops.matmul(x, ops.transpose(x, (0, 2, 1)))


@pytest.mark.parametrize(
    "make", [time_first, any_length, prime, folded, own_similarities]
)
def test_axes_that_only_look_alike_are_not_refused(make):
    tfgpipe.GPipe(keras.Model(*make()), 1, 2)
