"""Trains replicas and plain Keras on the same data."""

import functools

import keras
import numpy as np
import pytest
from keras import layers as kl
from kinds import (
    KINDS,
    Kind,
    Lookup,
    Plain,
    Split,
    classes,
    crossentropy,
    normal,
    token_weights,
    tokens,
    two_losses,
    user_loss,
    weights,
)
from matrix import arguments, largest_difference
from own_layers import Combine
from sharing_layers import Counter, Logits
from tiny import quickly

import tfgpipe


def small():
    return [
        kl.Dense(4, activation="tanh"),
        kl.Dense(4, kernel_regularizer="l2", activity_regularizer="l1"),
        kl.Dense(2),
    ]


def counting():
    return [kl.Dense(4), Counter(name="counter"), kl.Dense(2)]


def tied():
    embedding = kl.Embedding(9, 4)
    return [embedding, kl.Dense(4, activation="tanh"), Logits(embedding)]


def masked():
    return [kl.Embedding(11, 4, mask_zero=True), kl.Dense(4), kl.Dense(3)]


def noisy():
    """Layers whose numbers depend on the micro-batch and on seeds."""
    return [
        kl.Dense(6, activation="tanh"),
        kl.Dropout(0.3),
        kl.BatchNormalization(),
        kl.Dropout(0.3),
        kl.Dense(6),
    ]


NOISY = Kind(noisy, normal(5), normal(6))
# The kinds of `kinds.py` in three layers.
SMALL = {
    "dense": Kind(small, normal(5), normal(2)),
    "outputs": Kind(
        lambda: [Combine(), kl.Dense(4, activation="tanh"), Split()],
        lambda rng: {"a": normal(2)(rng), "b": normal(3)(rng)},
        KINDS["outputs"].y,
        two_losses,
        weights,
    ),
    "tied": Kind(
        tied,
        tokens(3, 9, False),
        classes(9, 3),
        crossentropy(),
        token_weights(3),
    ),
    "weighted_mean": Kind(
        masked,
        tokens(5, 11),
        normal(5, 3),
        KINDS["weighted_mean"].compile,
        token_weights(5),
    ),
    "user_loss": Kind(
        small,
        normal(5),
        normal(2),
        lambda: {"loss": user_loss, "metrics": [user_loss]},
    ),
    "lookups": Kind(  # by token, with a slice a row, and by position
        lambda: [kl.Dense(3), Lookup("tokens", "distances"), kl.Dense(3)],
        normal(5, 3),
        normal(5, 3),
    ),
    "counters": Kind(counting, normal(5), normal(2)),
}
ALL = {**KINDS, **{f"small_{name}": kind for name, kind in SMALL.items()}}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, 0.9, clipnorm=0.2),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.SGD(
        0.01, 0.9, gradient_accumulation_steps=2
    ),
    "average": lambda: keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        clipvalue=0.05,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
}


def replicas(layers, r, k, m=1, devices=None, **kwargs):
    """A model of R replicas of K devices."""
    with tfgpipe.PipelineStrategy(r, k, devices).scope():
        return tfgpipe.GPipe(layers, num_micro_batches=m, **kwargs)


def point(layers, r, k, m, schedule="gpipe", remat="except_last"):
    """A model for a point of the matrix of `test_transparency.py`."""
    chosen = arguments(k, m, schedule, remat)
    devices = chosen.pop("devices", None)
    width = len(devices or ()) or k
    if schedule == "written":
        width = chosen["schedule"].num_devices
    return replicas(layers, r, width, chosen.pop("num_micro_batches"), **chosen)


def train(
    kind, make, optimizer, batch_size=9, epochs=2, infers=False, **compiling
):
    """Trains; returns the numbers of training, and of inference if asked for.

    Of 19 rows: six steps, of 8, 8 and 3 rows; or of 9, 9 and 1 row.
    """
    rng = np.random.default_rng(3)
    keras.utils.set_random_seed(5)
    model = make(kind.layers())
    compiling = quickly(model, {**kind.compile(), **compiling})
    model.compile(OPTIMIZERS[optimizer](), **compiling)
    x, y, fit = kind.x(rng), kind.y(rng), kind.fit(rng)
    history = model.fit(
        x,
        y,
        batch_size,
        epochs,
        shuffle=False,
        verbose=0,
        validation_data=(x, y) if infers else None,
        **fit,
    ).history
    if not infers:
        return model, history
    tested = model.evaluate(x, y, batch_size, verbose=0, return_dict=True)
    return model, history, tested, model.predict(x, batch_size, verbose=0)


@functools.cache
def expected(name, optimizer, batch_size=9, infers=False):
    """What plain Keras gives."""
    model, *rest = train(
        ALL[name],
        Plain,
        optimizer,
        batch_size,
        infers=infers,
    )
    slots = [v.numpy() for v in model.optimizer.variables]
    return [w.numpy() for w in model.weights], slots, *rest


def difference(name, optimizer, make, batch_size=9, infers=False, **compiling):
    """The largest difference to plain Keras: weights, slots, logs, outputs."""
    weights, slots, history, *rest = expected(
        name, optimizer, batch_size, infers
    )
    model, found_history, *found_rest = train(
        ALL[name],
        make,
        optimizer,
        batch_size,
        infers=infers,
        **compiling,
    )
    assert found_history.keys() == history.keys()
    found_slots = [v.numpy() for v in model.optimizer.variables]
    return max(
        largest_difference([w.numpy() for w in model.weights], weights),
        largest_difference(found_slots, slots),
        largest_difference(found_history, history),
        largest_difference(found_rest, rest),
    )


def all_variables(make, kind=NOISY, batch_size=9, epochs=2, **compiling):
    """All variables after some steps."""
    model, _ = train(kind, make, "momentum", batch_size, epochs, **compiling)
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def refused(*parts):
    """Expects a ValueError that mentions all parts."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))
