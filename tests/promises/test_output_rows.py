"""Outputs of a functional model have a row for each row of the batch."""

import keras
import pytest
from keras import layers as kl
from keras import ops

import tfgpipe


def similarities(*length):
    """Logits of all rows with all rows, as CLIP's, and numbers of rows."""
    a, b = keras.Input((*length, 3), name="a"), keras.Input((3,), name="b")
    image = kl.Dense(4)(ops.mean(a, 1) if length else a)
    logits = ops.matmul(image, ops.transpose(kl.Dense(4)(b)))
    return [a, b], logits, kl.Dense(2)(image)


def inside():
    """In a model inside, with sequences of any length."""
    inputs, logits, rows = similarities(None)
    x = [keras.Input(t.shape[1:]) for t in inputs]
    return x, keras.Model(inputs, [rows, logits])(x)


def made(change):
    """Inputs, and what becomes of logits and of rows."""
    inputs, logits, rows = similarities()
    return inputs, change(logits, rows)


REFUSED = {
    "queue": lambda: made(lambda x, _: ops.concatenate([x[:, :1], x], -1)),
    "flat": lambda: made(lambda x, _: ops.reshape(x, (-1,))),
    "across": lambda: made(lambda _, rows: ops.transpose(rows)),
    "of all": lambda: made(lambda _, rows: ops.sum(rows, 0, keepdims=True)),
    "inside": inside,
}


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_are_not_one_a_row_are_refused(name):
    model = keras.Model(*REFUSED[name]())
    names = "row for each row.*output .*of shape "
    with pytest.raises(ValueError, match=names):
        tfgpipe.GPipe(model, 2, 2)
    tfgpipe.GPipe(model, 2, 1)


def test_the_output_that_is_wrong_is_named():
    inputs, logits, rows = similarities()
    model = keras.Model(inputs, {"rows": rows, "logits": logits})
    for m in (2, 8):
        with pytest.raises(ValueError, match=r"output \('logits',\)") as e:
            tfgpipe.GPipe(model, 1, m)
        assert "'rows'" not in str(e.value)


def time_first(x):
    """Rows are the second axis for a while."""
    h = ops.transpose(x, (1, 0, 2)) * ops.ones((5, 1, 1))
    return ops.transpose(h, (1, 0, 2))


def folded(x):
    h = kl.Dense(2)(ops.reshape(x, (-1, 3)))
    return ops.reshape(h, (-1, 5, 2))


# The shape of a row, and what becomes of it.
ALLOWED = {
    "time first": ((5, 3), time_first),
    "any length": (
        (None, 3),
        lambda x: ops.concatenate([kl.Dense(3)(x), x], 1),
    ),
    # An axis as long as the batch that is asked about.
    "prime": (
        (7919, 1),
        lambda x: ops.reshape(kl.Dense(2)(x), (-1, 2 * 7919)),
    ),
    "folded": ((5, 3), folded),
    # Of all positions of a row with each other.
    "own similarities": (
        (None, 3),
        lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))),
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_axes_that_only_look_alike_are_not_refused(name):
    shape, change = ALLOWED[name]
    x = keras.Input(shape)
    tfgpipe.GPipe(keras.Model(x, change(x)), 1, 2)
