"""What a layer keeps of its forward pass for its backward pass.

The layer is called in a graph that never runs, with placeholders for its
weights; then the graph is asked for gradients. What the operations that this
adds read of those that were there before has to be kept.
"""

from typing import Any

import keras
import tensorflow as tf

from tfgpipe.run.weights import num_bytes

# Operations that hand on the memory of their first input.
_ALIASES = {"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"}


def kept_bytes(layer: keras.layers.Layer, spec: Any) -> int:
    """Bytes that are kept between a layer's forward and backward pass.

    Weights and constants do not count; the layer's inputs do, where they are
    needed.

    Args:
        layer: A layer that is built; its variables need no values.
        spec: Nest of `keras.KerasTensor` that it is called on, all of whose
            sizes are known.

    Returns:
        Bytes.

    Example:

    >>> layer = keras.layers.Dense(4, activation="relu")
    >>> layer.build((2, 3))
    >>> kept_bytes(layer, keras.KerasTensor((2, 3)))  # 2 x 3 in, 2 x 4 out
    56
    """
    found: list[int] = []

    def trace() -> None:
        inputs = keras.tree.map_structure(_placeholder, spec)
        weights = [_placeholder(v) for v in layer.variables]
        scope = keras.StatelessScope(
            state_mapping=list(zip(layer.variables, weights, strict=True)),
            initialize_variables=False,
        )
        with scope:
            outputs = layer(inputs, training=True)
        of_trainable = {id(v) for v in layer.trainable_variables}
        sources = [
            weight
            for variable, weight in zip(layer.variables, weights, strict=True)
            if id(variable) in of_trainable
        ]
        sources += keras.tree.flatten(inputs)
        found.append(_kept(keras.tree.flatten(outputs), sources, weights))

    tf.function(trace, autograph=False).get_concrete_function()
    return found[0]


def _kept(outputs: list[Any], sources: list[Any], weights: list[Any]) -> int:
    """Bytes of the tensors that the gradient's operations read."""
    graph = tf.compat.v1.get_default_graph()
    forward = set(graph.get_operations())
    targets = [t for t in outputs if tf.is_tensor(t) and t.dtype.is_floating]
    floats = [t for t in sources if t.dtype.is_floating]
    if not (targets and floats):
        return 0
    gradients = tf.nest.flatten(
        [g for g in tf.gradients(targets, floats) if g is not None],
        expand_composites=True,  # those of embeddings
    )
    free = {weight.ref() for weight in weights}
    kept = {_owner(tensor).ref() for tensor in _read(gradients, forward)}
    return sum(
        spec_bytes(ref.deref())
        for ref in kept - free
        if ref.deref().op.type != "Const"
    )


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
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def spec_bytes(spec: Any) -> int:
    """Bytes of a nest of tensors or of specs whose sizes are all known."""
    return sum(map(num_bytes, keras.tree.flatten(spec)))
