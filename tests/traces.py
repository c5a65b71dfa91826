"""Layers that run once in one graph, and what is cut out of that graph."""

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.cells import Cell, ModelCall, Tracer
from tfgpipe.cells.model_trace import trace_model
from tfgpipe.graphs import (
    TraceOptions,
    by_reference,
    differentiate,
    without_gradients,
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
        return without_gradients(model)
    has = [t is not None and t.dtype.is_floating for t in model.handed_out]
    return differentiate(model, has, [True] * len(model.losses))


def tasks_of(made):
    """The tasks of all cells."""
    num_cells = max(made.traced.cells) + 1
    cells = [Cell(k, [], [f"CPU:{k}"]) for k in range(num_cells)]
    repeated = [[] for _ in made.traced.uses]
    tracer = Tracer(made.traced.options.jit_compile)
    return tracer.tasks(made, cells, repeated)


class Run:
    """A micro-batch on its way through cells, within a `tf.function`.

    Attributes:
        values: What is known, by the references of the graph's tensors.
        kept: By cell, what its forward pass keeps.
        sums: By cell, the sums of gradients.
    """

    def __init__(self, made, tasks, x):
        self.made, self.tasks = made, tasks
        model = made.traced
        self.values = by_reference(model.x, tree.flatten(x))
        self.values.update(
            (t.ref(), tf.convert_to_tensor(v.value)) for v, t in model.state
        )
        self.kept, self.sums = {}, {}

    def weights(self, k):
        """Those of a cell, packed."""
        own = self.tasks[k]
        return own.pack_weights(
            [
                tf.cast(tf.identity(use.variable.value), dtype)
                for use, dtype in zip(own.part.uses, own.weight_dtypes)
            ]
        )

    def given(self, k):
        """What a task of the backward pass takes."""
        return self.values, self.weights(k), self.kept[k]

    def forward(self, keeps=True):
        """Runs all forward tasks."""
        for k, own in enumerate(self.tasks):
            work = own.forward(self.values, self.weights(k), keeps)
            found, self.kept[k] = work()
            self.values.update(found)

    def recompute(self):
        """Runs all recomputations."""
        for k, own in enumerate(self.tasks):
            self.kept[k] = own.recompute(*self.given(k))()

    def begin_backward(self, dy, dlosses):
        """Takes gradients of what is handed out, and of the losses."""
        pairs = zip([*self.made.dy, *self.made.dlosses], [*dy, *dlosses])
        self.values.update((t.ref(), d) for t, d in pairs if t is not None)

    def backward(self, m=0, halves=False):
        """Runs all backward tasks, by halves where a cell has two."""
        for k, own in reversed([*enumerate(self.tasks)]):
            sums = self.sums.get(k)
            if halves and own.part.gives_back:
                dx, self.kept[k] = own.input_gradient(*self.given(k))()
                self.values.update(dx)
                work = own.backward(*self.given(k), sums, m, with_dx=False)
            else:
                work = own.backward(*self.given(k), sums, m)
            dx, self.sums[k] = work()
            self.values.update(dx)

    def of(self, tensors):
        """Values of tensors of the graph, None where there is none."""
        return [None if t is None else self.values[t.ref()] for t in tensors]

    def dx(self):
        """The gradients of what `Watched` returns, the first layer."""
        first = self.tasks[0]
        own = self.gradients()[: len(first.part.uses)]
        return [None if d is None else -d for d in own]

    def gradients(self):
        """The gradients of `TracedModel.uses`, finished."""
        found = {}
        for own, sums in zip(self.tasks, map(self.sums.get, range(99))):
            for use, d in zip(own.part.uses, own.unpack_sums(sums)):
                known = d.finished()
                if known is not None:
                    found[use.tensor.ref()] = known
        return [found.get(use.tensor.ref()) for use in self.made.traced.uses]
