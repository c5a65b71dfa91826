"""How the functional models of `functional.py` are trained, for the table."""

from __future__ import annotations

import keras
from functional import (
    Noise,
    captcha,
    closure_beside,
    dicts,
    encoder,
    masked_inside,
    nested,
    normalized,
    normed_beside,
    opened_beside,
    residual,
    reused,
    siamese,
    translator,
    unet,
    unmasked,
    wrong_length,
)
from keras import layers as kl
from kinds import ROWS, Kind, normal


def ids(length, size):
    return lambda rng: rng.integers(0, size, (ROWS, length))


def several(*parts):
    return lambda rng: [part(rng) for part in parts]


def by_name(**parts):
    return lambda rng: {name: part(rng) for name, part in parts.items()}


def losses():
    return {
        "loss": {"value": "mse", "label": "mae"},
        "loss_weights": {"value": 0.5, "label": 2.0},
        "metrics": {"label": ["mse"]},
    }


def shared_generator():
    """Two layers that draw from one generator, in Keras's order."""
    x = keras.Input((5,))
    generator = keras.random.SeedGenerator(1)
    first, second = Noise(generator), Noise(generator)
    h = second(kl.Dense(5)(kl.Dense(5)(x)))
    return keras.Model(x, kl.Dense(2)(h + first(x)))


def shared_statistics():
    """Two layers that have one batch norm inside."""
    x = keras.Input((1, 5))
    norm = kl.BatchNormalization()
    first, second = (kl.TimeDistributed(norm) for _ in range(2))
    h = second(kl.Dense(5)(kl.Dense(5)(x)))
    return keras.Model(x, kl.Dense(2)(h + first(x)))


def more_than_its_layers():
    """A nested model that does more than its layers."""
    x = keras.Input((5,))
    inner = keras.Sequential([keras.Input((5,)), kl.Dense(5)])
    inner.activity_regularizer = keras.regularizers.L2(0.1)
    call = inner.call
    inner.call = lambda *args, **kwargs: 2 * call(*args, **kwargs)
    return keras.Model(x, kl.Dense(2)(inner(x)))


pair = several(normal(4), normal(4))
outputs = by_name(value=normal(2), label=normal(3))
# With the largest M at which they have Keras's numbers.
FUNCTIONAL = {
    "unet": (Kind(unet, normal(8, 8, 2), normal(8, 8, 1)), 3),
    "residual": (Kind(residual, normal(5), normal(2)), 3),
    "siamese": (Kind(siamese, pair, normal(1)), 3),
    "dicts": (
        Kind(dicts, by_name(z=normal(3), a=normal(2)), outputs, losses),
        3,
    ),
    "translator": (
        Kind(translator, several(ids(6, 9), ids(5, 9)), normal(5, 3)),
        3,
    ),
    "nested": (Kind(nested, ids(4, 9), normal(8)), 3),
    "reused": (Kind(reused, pair, normal(20)), 3),
    "masked_inside": (Kind(masked_inside, ids(6, 9), normal(2)), 3),
    "unmasked": (
        Kind(
            unmasked,
            ids(6, 9),
            several(normal(6, 2), normal(6, 4), normal(6, 3)),
            lambda: {"loss": ["mse"] * 3},
        ),
        3,
    ),
    "captcha": (
        Kind(
            captcha,
            several(lambda rng: 1 + ids(2, 4)(rng), normal(6, 4)),
            normal(4, 5),
        ),
        1,
    ),
    "normalized": (Kind(normalized, normal(5), normal(2)), 1),
    "opened": (Kind(encoder, normal(5, 4), normal(2)), 1),
    "more_than_its_layers": (
        Kind(more_than_its_layers, normal(5), normal(2)),
        2,
    ),
    "wrong_length": (
        Kind(wrong_length, several(normal(2, 4), normal(5, 4)), normal(5, 2)),
        2,
    ),
    "shared_generator": (Kind(shared_generator, normal(5), normal(2)), 1),
    "shared_statistics": (
        Kind(shared_statistics, normal(1, 5), normal(1, 2)),
        1,
    ),
    # Branches that share state are called in the order of Keras.
    **{
        make.__name__: (Kind(make, normal(4), normal(5)), 1)
        for make in (normed_beside, closure_beside)
    },
    "opened_beside": (Kind(opened_beside, normal(4), normal(5)), 1),
}
