"""What a trial says of layers on rows and on parts of them."""

import warnings

import tensorflow as tf
from keras import tree

from tfgpipe.cells import Cell, ModelCall, trace_model
from tfgpipe.graphs import TraceOptions
from tfgpipe.trial import Trial


def said_of(layers, shape):
    """What a trial says of built layers; the shape is that of inputs."""
    spec = tf.TensorSpec(shape, "float32")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tried(layers, spec).tell()
    return [str(one.message) for one in found]


def tried(
    layers,
    spec,
    training=True,
    data=None,
    cast=None,
    call=None,
):
    """A trial of built layers, one after the other, on rows of data if any.

    Or as `call` calls them.
    """

    def in_turn(x, training):
        for layer in layers:
            x = layer(x, training=training)
        return x

    own = ModelCall(call or in_turn, layers, training, is_split=True)
    trial = Trial("warn")
    if data is not None:
        trial.note_data(data, cast)
    cell = Cell(0, [], ["/device:CPU:0"])
    specs = tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), spec)
    traced = trace_model(own, specs, None, TraceOptions())
    trial.run(own, traced, [cell], spec, 2)
    return trial
