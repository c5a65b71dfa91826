"""A layer computed in columns, each group of them on a device of its own.

    x --+--> x W[:, 0:2] --+
        |                  +--> y, whole again
        +--> x W[:, 2:4] --+

The layer's own `call` runs for each group, and reads those columns of its
weights. No sum has another order than in the whole layer. Going back, each
group has a gradient of x, and these are added up, in order: a sum over columns
is one over groups of them.

The columns of an attention are its heads, and what its last projection makes of
some is a part of a sum: these are added up, in order, going forward, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import tree

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

WITH_COLUMNS = (
    "Dense, EinsumDense, Embedding, ReversibleEmbedding, and "
    "MultiHeadAttention without dropout"
)


class Columns(NamedTuple):
    """Where a layer has its columns.

    Attributes:
        axes: Weights that have them, and their axes; others are taken whole.
        size: How many columns there are.
        output_axis: That of the outputs; None if these are added up.
        left: What is done of the whole, behind them: a layer and the name of
            its attribute, "activation" or "bias"; None for nothing.
    """

    axes: Sequence[tuple[keras.Variable, int]]
    size: int
    output_axis: int | None = -1
    left: tuple[Any, str] | None = None

    def pieces(self, count: int) -> list[Pieces]:
        """The columns of each group."""
        each = [
            [(weight, piece) for piece in pieces_of(axis, self.size, count)]
            for weight, axis in self.axes
        ]
        return [*zip(*each)]

    def without_left(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the layer does not do what is left."""
        if self.left is None:
            return contextlib.nullcontext()
        return internals.replaced(*self.left, None)

    def joined(self, made: Sequence[Any]) -> Any:
        """What all groups made, as the whole layer returns it."""
        if self.output_axis is None:
            y = _added(*made)
        else:
            y = tf.concat(made, self.output_axis)
        mask = internals.get_mask(made[0])
        if mask is not None:
            internals.set_mask(y, mask)
        if self.left is None:
            return y
        layer, name = self.left
        value = getattr(layer, name)
        return value(y) if name == "activation" else keras.ops.add(y, value)


# Methods that a subclass may define without a word: they do not compute.
_HARMLESS = {"__init__", "from_config", "get_config"}


def computes_columns(layer: keras.layers.Layer) -> bool:
    """Whether a layer computes as Keras wrote it, or says `is_column_wise`.

    A subclass may make something of the weights for which it needs all columns,
    and an instance may have a `call` of its own.
    """
    own: set[str] = set()
    for cls in type(layer).__mro__:
        if internals.is_keras(cls):
            break
        own |= {n for n, v in vars(cls).items() if hasattr(v, "__get__")}
    says = bool(getattr(layer, "is_column_wise", False))
    return "call" not in vars(layer) and (says or own <= _HARMLESS)


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
        axes = {internals.KERNEL: 1, "bias": 0, "lora_kernel_b": 1}
        return _found(layer, axes)._replace(left=_left(layer))
    if call is kl.EinsumDense.call:
        return _of_einsum(layer, count)
    if call is kl.MultiHeadAttention.call:
        return _of_attention(layer)
    if call is kl.Embedding.call or not reverse:
        is_table = call in (kl.Embedding.call, *_reversible())
        axes = {internals.TABLE: 1, "lora_embeddings_b": 1}
        return _found(layer, axes) if is_table else None
    if call not in _reversible():
        return None
    if layer.tie_weights:  # the words are columns of the transposed table
        return _found(layer, {internals.TABLE: 0, "lora_embeddings_a": 0})
    return _found(layer, {"reverse_embeddings": 1})


def num_columns(layer: Any, count: int) -> int:
    """Returns how many columns a layer has for `count` groups; 0 for none."""
    columns = columns_of(layer, count) if computes_columns(layer) else None
    return 0 if columns is None else columns.size


def _reversible() -> tuple[Any, ...]:
    found = getattr(kl, "ReversibleEmbedding", None)  # not in all versions
    return () if found is None else (found.call,)


def _found(layer: Any, axes: Mapping[str, int]) -> Columns:
    """Those along some axes of the weights with these names."""
    own = [
        (variable, axis)
        for name, axis in axes.items()
        if (variable := getattr(layer, name, None)) is not None
    ]
    first, axis = own[0]
    return Columns(own, first.shape[axis])


def _left(layer: Any) -> tuple[Any, str] | None:
    is_apart = layer.activation not in (None, *_ELEMENTWISE)
    return (layer, "activation") if is_apart else None


def _of_einsum(layer: Any, count: int) -> Columns | None:
    """Along an axis of the kernel that outputs have, and inputs have not."""
    inputs, kernel, outputs = layer.equation.replace("->", ",").split(",")
    shape = getattr(layer, internals.KERNEL).shape
    sizes = dict(zip(kernel, shape))
    own = [a for a in outputs if a in kernel and a not in inputs]
    is_repeated = len({*kernel}) < len(kernel)
    if is_repeated or not own or "..." in outputs[outputs.index(own[0]) :]:
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
    found = _found(layer, axes)
    return found._replace(output_axis=output_axis, left=_left(layer))


def _of_attention(layer: Any) -> Columns | None:
    """Its heads; dropout would draw other numbers for some of them."""
    projections = layer.query_dense, layer.key_dense, layer.value_dense
    parts = [*projections, layer.output_dense]
    of_parts = {id(weight) for part in parts for weight in part.weights}
    is_known = {*map(id, layer.weights)} <= of_parts  # it may have a gate
    if layer.dropout or not is_known:
        return None
    if any(
        getattr(part, "quantization_mode", None) or part.lora_enabled
        for part in parts
    ):
        return None
    each = [
        _found(part, {internals.KERNEL: 1, "bias": 0}) for part in projections
    ]
    last = _found(layer.output_dense, {internals.KERNEL: 0})
    has_bias = layer.output_dense.bias is not None
    return Columns(
        [pair for own in (*each, last) for pair in own.axes],
        each[0].size,
        None,
        (layer.output_dense, "bias") if has_bias else None,
    )


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
    if not computes_columns(layer):
        raise ValueError(
            "`shards` must be of layers that compute as Keras wrote them. "
            f"Received: layer '{layer.name}', whose `call` was replaced. Leave "
            "it out."
        )
    call = layer.call

    @functools.wraps(call)
    def call_in_columns(*args: Any, **kwargs: Any) -> Any:
        said = [*args[1:2], kwargs.get("reverse")]
        is_reverse = any(isinstance(t, int | np.bool_) and t for t in said)
        columns = columns_of(layer, count, is_reverse)
        if columns is None or columns.size < count:
            raise ValueError(
                "`shards` must be of layers with columns in all their calls. "
                f"Received: a call of layer '{layer.name}' for {count} shards "
                f"with {0 if columns is None else columns.size}. Leave it out."
            )
        _check_mask(layer, kwargs.get("attention_mask"))
        made = []
        copies, known = _handed_out((args, kwargs), count)
        for i, pieces in enumerate(columns.pieces(count)):
            begin(i)
            with reading(pieces), columns.without_left():
                own_args, own_kwargs = copies[i]
                made.append(call(*own_args, **own_kwargs))
        begin(count)
        # As the layer leaves them: attention takes masks off what it gets.
        for tensor, own_copies in known:
            internals.set_mask(tensor, internals.get_mask(own_copies[0]))
        if not all(map(tf.is_tensor, made)):
            raise ValueError(
                "`shards` must be of layers that return one tensor. Received: "
                f"layer '{layer.name}', which returns a "
                f"{type(made[0]).__name__}, such as attention scores. Leave it "
                "out."
            )
        return columns.joined(made)

    return call_in_columns


def _check_mask(layer: Any, mask: Any) -> None:
    """Refuses a mask of each head, of which each group would need its own."""
    if mask is not None and len(mask.shape) > 3:
        raise ValueError(
            "`shards` must be of attention whose mask is the same for all "
            f"heads. Received: layer '{layer.name}' and a mask of shape "
            f"{tuple(mask.shape)}. Leave it out."
        )


def _handed_out(
    given: Any, count: int
) -> tuple[list[Any], list[tuple[tf.Tensor, Sequence[tf.Tensor]]]]:
    """Arguments for each group; gradients of theirs are added up in order.

    And which tensors were copied, with their copies.
    """
    known: dict[int, tuple[tf.Tensor, Sequence[tf.Tensor]]] = {}
    for one in tree.flatten(given):
        is_one = isinstance(one, tf.Tensor) and is_continuous(one)
        if is_one and id(one) not in known:
            known[id(one)] = one, internals.copies_of(one, count, _added)

    def of_group(i: int) -> Any:
        def own(one: Any) -> Any:
            return known[id(one)][1][i] if id(one) in known else one

        return tree.map_structure(own, given)

    return [of_group(i) for i in range(count)], [*known.values()]


def _added(*tensors: tf.Tensor) -> tf.Tensor:
    """Their sum, from the first to the last."""
    return functools.reduce(lambda a, b: tf.raw_ops.AddV2(x=a, y=b), tensors)
