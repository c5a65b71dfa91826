"""What a layer keeps of its forward pass for its backward pass.

The layer is called in a graph that never runs, with placeholders for its
weights; then the graph is asked for gradients. What the operations that this
adds read of those that were there before has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import placement

# Operations that hand on the memory of their first input.
_ALIASES = {"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"}


class Kept(NamedTuple):
    """Bytes that are kept between a layer's forward and backward pass.

    Two layers in a row may both keep the tensor between them: it is one.

    Attributes:
        inputs: Of the layer's inputs.
        outputs: Of its outputs.
        others: Of all else; weights and constants do not count.
    """

    inputs: int
    outputs: int
    others: int


def kept_bytes(
    layer: keras.layers.Layer, spec: Any, call: Callable | None = None
) -> Kept:
    """Bytes that are kept between a layer's forward and backward pass.

    Args:
        layer: A layer that is built; its variables need no values.
        spec: Nest of `keras.KerasTensor` that it is called on, all of whose
            sizes are known.
        call: Calls it on such a nest, for a `training`; None for the layer.

    Example:

    >>> layer = keras.layers.Dense(4, activation="relu")
    >>> layer.build((2, 3))
    >>> kept_bytes(layer, keras.KerasTensor((2, 3)))  # 2 x 3 in, 2 x 4 out
    Kept(inputs=24, outputs=32, others=0)
    """
    found: list[Kept] = []

    def trace() -> None:
        inputs = keras.tree.map_structure(_placeholder, spec)
        weights = [_placeholder(v) for v in layer.variables]
        scope = keras.StatelessScope(
            state_mapping=list(zip(layer.variables, weights, strict=True)),
            initialize_variables=False,
        )
        with scope:
            outputs = (call or layer)(inputs, training=True)
        of_trainable = {id(v) for v in layer.trainable_variables}
        sources = [
            weight
            for variable, weight in zip(layer.variables, weights, strict=True)
            if id(variable) in of_trainable
        ]
        given = [t for t in keras.tree.flatten(inputs) if tf.is_tensor(t)]
        made = [t for t in keras.tree.flatten(outputs) if tf.is_tensor(t)]
        found.append(_kept(made, sources, weights, given))

    with internals.seed_generator_kept():
        tf.function(trace, autograph=False).get_concrete_function()
    return found[0]


def _kept(
    outputs: list[Any], sources: list[Any], weights: list[Any], given: list[Any]
) -> Kept:
    """Bytes of the tensors that the gradient's operations read."""
    graph = tf.compat.v1.get_default_graph()
    forward = set(graph.get_operations())
    targets = [t for t in outputs if t.dtype.is_floating]
    floats = [t for t in [*sources, *given] if t.dtype.is_floating]
    if not (targets and floats):
        return Kept(0, 0, 0)
    gradients = tf.nest.flatten(
        [g for g in tf.gradients(targets, floats) if g is not None],
        expand_composites=True,  # those of embeddings
    )
    free = {weight.ref() for weight in weights}
    kept = {_owner(tensor).ref() for tensor in _read(gradients, forward)}
    kept = {r for r in kept - free if r.deref().op.type != "Const"}
    first = {t.ref() for t in given}
    last = {_owner(t).ref() for t in outputs} - first
    return Kept(
        _bytes(kept & first), _bytes(kept & last), _bytes(kept - first - last)
    )


def _bytes(references: set[Any]) -> int:
    return sum(placement.num_bytes(ref.deref()) for ref in references)


def _read(gradients: list[Any], forward: set[Any]) -> list[Any]:
    """The tensors of the forward pass that these gradients need."""
    found, seen = [], set()
    waiting = list(gradients)
    while waiting:
        tensor = waiting.pop()
        if tensor.op in forward:
            found.append(tensor)
        elif tensor.op not in seen:
            seen.add(tensor.op)
            waiting += tensor.op.inputs
    return found


def _owner(tensor: Any) -> Any:
    """The tensor whose memory this one has."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def _placeholder(spec: Any) -> Any:
    if spec is None:
        return None
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)
