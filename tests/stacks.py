"""Layers one after the other, without a model around them."""

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
from keras.src.backend.common import global_state

from models import transformer_lm

VOCABULARY = 11


@contextlib.contextmanager
def no_weights_allocated() -> Iterator[None]:
    """Variables made inside have a shape, and never get a value."""
    with keras.StatelessScope(initialize_variables=False):
        yield
    global_state.set_global_attribute("uninitialized_variables", [])


def build(layers: list[keras.layers.Layer], shape: tuple) -> list[tuple]:
    """Builds layer after layer; returns the shape each one returns."""
    shapes = []
    for layer in layers:
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
        shapes.append(shape)
    return shapes


def call(layers: list[keras.layers.Layer], x, training: bool = False):
    for layer in layers:
        x = layer(x, training=training)
    return x


def tiny(num_layers=2, **kwargs):
    kwargs = {"max_length": 6, **kwargs}
    return transformer_lm.transformer_lm(
        num_layers, 8, 16, 2, VOCABULARY, **kwargs
    )


def tokens(rows=2, length=6, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY, (rows, length)).astype("int32")


def count(weights):
    return sum(int(np.prod(w.shape)) for w in weights)
