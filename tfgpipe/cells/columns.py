"""A layer computed in columns, each group of them on a device of its own.

    x --+--> x W[:, 0:2] --+
        |                  +--> y, whole again
        +--> x W[:, 2:4] --+

The layer's `call` runs for each group, and reads those columns of its weights.
No sum has another order than in the whole layer. Going back, each group has a
gradient of x, and these are added up, in order: a sum over columns is one over
groups of them.

The columns of an attention are its heads. Its last projection makes a part of a
sum of each group: these are added up, in order, going forward, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import tree

from tfgpipe import internals
from tfgpipe.graphs import Piece, is_continuous, pieces_of

# Activations that need one column alone. Of a sigmoid, Keras knows the logits:
# it is not among them.
_ELEMENTWISE = {
    getattr(keras.activations, name)
    for name in (
        "celu elu exponential gelu hard_sigmoid hard_silu hard_tanh leaky_relu "
        "linear log_sigmoid mish relu relu6 selu silu softplus softsign "
        "squareplus tanh"
    ).split()
}

# Methods that a subclass may define: they do not compute.
_HARMLESS = {"__init__", "from_config", "get_config"}

# A weight, and some of its columns.
Pieces = Sequence[tuple[keras.Variable, Piece]]

WITH_COLUMNS = (
    "Dense, EinsumDense, Embedding, ReversibleEmbedding, and "
    "MultiHeadAttention without dropout"
)


class Columns(NamedTuple):
    """The columns of a layer.

    Attributes:
        axes: The weights that have columns, and their axes; others are whole.
        size: The number of columns.
        output_axis: The axis of the outputs; None if outputs are added up.
        last: The name of the attribute that is applied to the whole output,
            "activation" or "bias", and its layer; None for nothing.
    """

    axes: Sequence[tuple[keras.Variable, int]]
    size: int
    output_axis: int | None = -1
    last: tuple[keras.layers.Layer, str] | None = None

    def without_last(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the layer does not apply `last`."""
        if self.last is None:
            return contextlib.nullcontext()
        return internals.replaced(*self.last, None)

    def joined(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Joins the outputs of all groups to the whole layer's."""
        if self.output_axis is None:
            y = _add(*outputs)
        else:
            y = tf.concat(outputs, self.output_axis)
        mask = internals.get_mask(outputs[0])
        if mask is not None:
            internals.set_mask(y, mask)
        if self.last is None:
            return y
        layer, name = self.last
        value = getattr(layer, name)
        return value(y) if name == "activation" else keras.ops.add(y, value)


def computes_columns(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer computes as Keras does, or is `is_column_wise`.

    A subclass may need all columns of the weights, and an instance may have
    another `call`.
    """
    if "call" in vars(layer):
        return False
    if getattr(layer, "is_column_wise", False):
        return True
    return internals.overridden(layer) <= _HARMLESS


def num_columns(layer: keras.layers.Layer, count: int) -> int:
    """Returns how many columns a layer has for `count` groups; 0 for none."""
    columns = columns_of(layer, count) if computes_columns(layer) else None
    return 0 if columns is None else columns.size


def columns_of(
    layer: keras.layers.Layer, count: int, reverse: bool = False
) -> Columns | None:
    """Returns the columns of a layer for `count` groups; None if it has none.

    `reverse` is an argument of the call of an embedding.
    """
    if getattr(layer, "quantization_mode", None) is not None:
        return None
    call = type(layer).call
    if call is kl.Dense.call:
        axes = {internals.KERNEL: 1, "bias": 0, "lora_kernel_b": 1}
        return _along(layer, axes)
    if call is kl.EinsumDense.call:
        return _of_einsum(layer, count)
    if call is kl.MultiHeadAttention.call:
        return _of_attention(layer)
    # Not in all versions of Keras.
    reversible = getattr(getattr(kl, "ReversibleEmbedding", None), "call", None)
    if call not in (kl.Embedding.call, reversible):
        return None
    if call is kl.Embedding.call or not reverse:
        return _along(layer, {internals.TABLE: 1, "lora_embeddings_b": 1})
    if layer.tie_weights:  # the words are columns of the transposed table
        return _along(layer, {internals.TABLE: 0, "lora_embeddings_a": 0})
    return _along(layer, {"reverse_embeddings": 1})


def _along(layer: keras.layers.Layer, axes: dict[str, int]) -> Columns:
    """Returns columns along axes of the weights with these names."""
    weights = [
        (weight, axis)
        for name, axis in axes.items()
        if (weight := getattr(layer, name, None)) is not None
    ]
    first, axis = weights[0]
    activation = getattr(layer, "activation", None)
    is_of_all = activation not in (None, *_ELEMENTWISE)
    last = (layer, "activation") if is_of_all else None
    return Columns(weights, first.shape[axis], last=last)


def _of_einsum(layer: keras.layers.EinsumDense, count: int) -> Columns | None:
    """Returns columns along an axis that kernel and outputs share."""
    inputs, kernel, outputs = layer.equation.replace("->", ",").split(",")
    shape = getattr(layer, internals.KERNEL).shape
    sizes = dict(zip(kernel, shape))
    letters = [a for a in outputs if a in kernel and a not in inputs]
    is_repeated = len({*kernel}) < len(kernel)
    if is_repeated or not letters:
        return None
    if "..." in outputs[outputs.index(letters[0]) :]:
        return None
    enough = [a for a in letters if sizes[a] >= count]
    letter = (enough or letters)[0]
    axis = kernel.index(letter)
    output_axis = outputs.index(letter) - len(outputs)
    is_last = axis == len(shape) - 1
    of_lora = {"lora_kernel_b": 1} if is_last else {"lora_kernel_a": axis}
    axes = {internals.KERNEL: axis, **of_lora}
    if layer.bias is not None:
        bias_shape = layer.bias.shape
        bias_axis = len(bias_shape) + output_axis
        if bias_axis >= 0 and bias_shape[bias_axis] == sizes[letter]:
            axes["bias"] = bias_axis
    return _along(layer, axes)._replace(output_axis=output_axis)


def _of_attention(layer: keras.layers.MultiHeadAttention) -> Columns | None:
    """Returns its heads; dropout would draw other numbers for some of them."""
    projections = layer.query_dense, layer.key_dense, layer.value_dense
    output = layer.output_dense
    inner = [*projections, output]
    inner_weights = {id(weight) for part in inner for weight in part.weights}
    is_known = {*map(id, layer.weights)} <= inner_weights  # it may have a gate
    is_changed = any(
        getattr(part, "quantization_mode", None) or part.lora_enabled
        for part in inner
    )
    if layer.dropout or not is_known or is_changed:
        return None
    columns = [
        *(_along(p, {internals.KERNEL: 1, "bias": 0}) for p in projections),
        _along(output, {internals.KERNEL: 0}),
    ]
    return Columns(
        [pair for column in columns for pair in column.axes],
        columns[0].size,
        None,
        None if output.bias is None else (output, "bias"),
    )


def in_columns(
    layer: keras.layers.Layer,
    count: int,
    begin: Callable[[int], None],
    reading: Callable[[Pieces], contextlib.AbstractContextManager[None]],
) -> Callable[..., tf.Tensor]:
    """Returns a layer's `call`, in groups of columns.

    Args:
        layer: The layer.
        count: The number of groups.
        begin: Begins the operations of group i, or after all of them.
        reading: Returns a context in which pieces of weights are read.
    """
    if not computes_columns(layer):
        raise _refusal(
            "layers that compute as Keras wrote them",
            f"layer '{layer.name}', whose `call` was replaced",
        )
    call = layer.call

    @functools.wraps(call)
    def call_in_columns(*args: Any, **kwargs: Any) -> tf.Tensor:
        flags = [*args[1:2], kwargs.get("reverse")]
        reverse = any(isinstance(t, int | np.bool_) and t for t in flags)
        columns = columns_of(layer, count, reverse)
        if columns is None or columns.size < count:
            raise _refusal(
                "layers with columns in all their calls",
                f"a call of layer '{layer.name}' with fewer than {count}",
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and len(mask.shape) > 3:
            raise _refusal(
                "attention whose mask is the same for all heads",
                f"layer '{layer.name}' and a mask of shape {tuple(mask.shape)}",
            )
        # Arguments are copied for each group; gradients are added in order.
        copies: dict[int, tuple[tf.Tensor, Sequence[tf.Tensor]]] = {}
        for leaf in tree.flatten((args, kwargs)):
            is_copied = isinstance(leaf, tf.Tensor) and is_continuous(leaf)
            if is_copied and id(leaf) not in copies:
                copies[id(leaf)] = leaf, internals.copies_of(leaf, count, _add)

        def copy(leaf: Any, i: int) -> Any:
            return copies[id(leaf)][1][i] if id(leaf) in copies else leaf

        by_weight = [
            [(weight, piece) for piece in pieces_of(axis, columns.size, count)]
            for weight, axis in columns.axes
        ]
        outputs = []
        for i, pieces in enumerate(zip(*by_weight)):
            begin(i)
            taken, named = tree.map_structure(
                functools.partial(copy, i=i), (args, kwargs)
            )
            with reading(pieces), columns.without_last():
                outputs.append(call(*taken, **named))
        begin(count)
        # As the layer leaves them: attention takes masks off its arguments.
        for tensor, (first, *_) in copies.values():
            internals.set_mask(tensor, internals.get_mask(first))
        if not all(map(tf.is_tensor, outputs)):
            raise _refusal(
                "layers that return one tensor",
                f"layer '{layer.name}', a {type(outputs[0]).__name__}",
            )
        return columns.joined(outputs)

    return call_in_columns


def _refusal(expected: str, received: str) -> ValueError:
    return ValueError(
        f"`shards` must be of {expected}. Received: {received}. Leave it out."
    )


def _add(*tensors: tf.Tensor) -> tf.Tensor:
    """Adds tensors, from the first to the last."""
    return functools.reduce(lambda a, b: tf.raw_ops.AddV2(x=a, y=b), tensors)
