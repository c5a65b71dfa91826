"""A layer computed in columns, each group of them on a device of its own.

    x --+--> x W[:, 0:2] --+
        |                  +--> y, whole again
        +--> x W[:, 2:4] --+

The layer's own `call` runs for each group, and reads those columns of its
weights. No sum has another order than in the whole layer. Going back, each
group has a gradient of x, and these are added up, in order: a sum over columns
is one over groups of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import layers as kl

from tfgpipe import internals
from tfgpipe.graphs import Piece, is_continuous, pieces_of

# What needs one column alone. Of a sigmoid, Keras knows the logits: it is not
# among them.
_ELEMENTWISE = {
    getattr(keras.activations, name)
    for name in (
        "celu",
        "elu",
        "exponential",
        "gelu",
        "hard_sigmoid",
        "hard_silu",
        "hard_tanh",
        "leaky_relu",
        "linear",
        "log_sigmoid",
        "mish",
        "relu",
        "relu6",
        "selu",
        "silu",
        "softplus",
        "softsign",
        "squareplus",
        "tanh",
    )
}

Pieces = Sequence[tuple[keras.Variable, Piece]]

KINDS = "Dense, EinsumDense, Embedding, ReversibleEmbedding"


class Columns(NamedTuple):
    """Where a layer has its columns.

    Attributes:
        axes: Weights that have them, and their axes; others are taken whole.
        size: How many columns there are.
        output_axis: That of the outputs.
    """

    axes: Sequence[tuple[keras.Variable, int]]
    size: int
    output_axis: int

    def pieces(self, count: int) -> list[Pieces]:
        """The columns of each group."""
        each = [
            [(weight, piece) for piece in pieces_of(axis, self.size, count)]
            for weight, axis in self.axes
        ]
        return [*zip(*each)]


def columns_of(
    layer: keras.layers.Layer, count: int, reverse: bool = False
) -> Columns | None:
    """The columns of a layer for `count` groups; None if it has none.

    `reverse` is an argument of the call of an embedding.
    """
    if getattr(layer, "quantization_mode", None) is not None:
        return None
    call = type(layer).call
    if call is kl.Dense.call:
        return _found(
            layer, {internals.KERNEL: 1, "bias": 0, "lora_kernel_b": 1}
        )
    if call is kl.EinsumDense.call:
        return _of_einsum(layer, count)
    if call is kl.Embedding.call or not reverse:
        is_table = call in (kl.Embedding.call, *_reversible())
        axes = {internals.TABLE: 1, "lora_embeddings_b": 1}
        return _found(layer, axes) if is_table else None
    if call not in _reversible():
        return None
    if layer.tie_weights:  # the words are columns of the transposed table
        return _found(layer, {internals.TABLE: 0, "lora_embeddings_a": 0})
    return _found(layer, {"reverse_embeddings": 1})


def _reversible() -> tuple[Any, ...]:
    found = getattr(kl, "ReversibleEmbedding", None)  # not in all versions
    return () if found is None else (found.call,)


def _found(
    layer: Any, axes: Mapping[str, int], output_axis: int = -1
) -> Columns:
    """Those along some axes of the weights with these names."""
    own = [
        (variable, axis)
        for name, axis in axes.items()
        if (variable := getattr(layer, name, None)) is not None
    ]
    first, axis = own[0]
    return Columns(own, first.shape[axis], output_axis)


def _of_einsum(layer: Any, count: int) -> Columns | None:
    """Along an axis of the kernel that outputs have, and inputs have not."""
    inputs, kernel, outputs = layer.equation.replace("->", ",").split(",")
    shape = getattr(layer, internals.KERNEL).shape
    sizes = dict(zip(kernel, shape))
    own = [a for a in outputs if a in kernel and a not in inputs]
    if not own or "..." in outputs[outputs.index(own[0]) :]:
        return None
    enough = [a for a in own if sizes[a] >= count]
    letter = (enough or own)[0]
    axis = kernel.index(letter)
    output_axis = outputs.index(letter) - len(outputs)
    is_last = axis == len(shape) - 1
    of_lora = {"lora_kernel_b": 1} if is_last else {"lora_kernel_a": axis}
    axes = {internals.KERNEL: axis, **of_lora}
    bias = layer.bias
    if bias is not None:
        place = len(bias.shape) + output_axis
        if place >= 0 and bias.shape[place] == sizes[letter]:
            axes["bias"] = place
    return _found(layer, axes, output_axis)


def in_columns(
    layer: Any,
    count: int,
    begin: Callable[[int], None],
    reading: Callable[[Pieces], Any],
) -> Callable[..., Any]:
    """A layer's `call`, in so many groups of columns.

    Args:
        layer: The layer.
        count: How many groups there are.
        begin: Begins what is computed of group i, or behind all of them.
        reading: A context in which pieces of weights are read.
    """
    call = layer.call

    @functools.wraps(call)
    def call_in_columns(x: Any, *args: Any, **kwargs: Any) -> Any:
        is_reverse = bool(kwargs.get("reverse", args[:1] == (True,)))
        columns = columns_of(layer, count, is_reverse)
        if columns is None or columns.size < count:
            raise ValueError(
                "`shards` must be of layers with columns in all their calls. "
                f"Received: a call of layer '{layer.name}' for {count} shards "
                f"with {0 if columns is None else columns.size}. Leave it out."
            )
        activation = getattr(layer, "activation", None)
        own = activation if activation in _ELEMENTWISE else None
        made = []
        copies = _handed_out(x, count)
        for i, pieces in enumerate(columns.pieces(count)):
            begin(i)
            with reading(pieces), internals.replaced(layer, "activation", own):
                made.append(call(copies[i], *args, **kwargs))
        begin(count)
        y = tf.concat(made, columns.output_axis)
        mask = internals.get_mask(made[0])
        if mask is not None:
            internals.set_mask(y, mask)
        if activation is not None and own is None:
            y = activation(y)
        return y

    return call_in_columns


def _handed_out(x: Any, count: int) -> Sequence[Any]:
    """A tensor for each group; their gradients are added up in order."""
    if not is_continuous(x):
        return [x] * count

    @tf.custom_gradient
    def copied(x: tf.Tensor) -> Any:
        def add(*gradients: tf.Tensor) -> tf.Tensor:
            return functools.reduce(
                lambda a, b: tf.raw_ops.AddV2(x=a, y=b), gradients
            )

        return [tf.identity(x) for _ in range(count)], add

    found: Sequence[Any] = copied(x)
    return found
