"""Layers that run once in one graph, and what is cut out of that graph."""

import keras
from keras import tree

from tfgpipe.cells import ModelCall
from tfgpipe.cells.tracer import trace_model
from tfgpipe.graphs import (
    TraceOptions,
    differentiate,
)


class Watched(keras.layers.Layer):
    """Subtracts weights of zeros from what comes in, a nest of specs.

    Layers behind it have gradients with respect to their inputs: those of these
    weights, negated.
    """

    def __init__(self, specs):
        super().__init__(autocast=False)
        self.zeros = [
            self.add_weight(
                [n or 1 for n in t.shape], "zeros", dtype=t.dtype.name
            )
            for t in tree.flatten(specs)
        ]

    def call(self, x):
        flat = [t - w.value for t, w in zip(tree.flatten(x), self.zeros)]
        return tree.pack_sequence_as(x, flat)


def model_call(layers, places=None, **kwargs):
    """The call of layers, one after the other, each in a cell of its own.

    With `places`, each is in that cell.
    """
    places = [*range(len(layers))] if places is None else places
    homes, calls = {}, {}
    for layer, place in zip(layers, places, strict=True):
        calls[id(layer)] = calls.get(id(layer), -1) + 1
        homes[id(layer), calls[id(layer)]] = place

    def call(x, training):
        for layer in layers:
            x = layer(x, training=training)
        return x

    given = {
        "training": True,
        "is_split": False,
        "home": lambda layer, call: homes.get((id(layer), call)),
        "num_cells": max(places) + 1,
    }
    return ModelCall(call, layers, **{**given, **kwargs})


def traced(layers, x, places=None, options=None, **kwargs):
    """The graph of layers on a nest of specs, see `model_call`."""
    call = model_call(layers, places, **kwargs)
    return trace_model(call, x, None, options or TraceOptions())


def differentiated(model):
    """With gradients of all that may have one."""
    if model.tape is None:
        return model
    has = [t is not None and t.dtype.is_floating for t in model.handed_out]
    return differentiate(model, has, [True] * len(model.losses))
