"""Attention of Transformers, for whole sequences and token by token.

The dense layers are those of `keras.layers.MultiHeadAttention`, between them is
`keras.ops.dot_product_attention`; see `_as_one_matrix` for why Keras's layer is
not called as one. Both layers here are pre-norm and include their shortcut:
x + dropout(f(norm(x))).

Beside the call for whole sequences they have `step`, for decoding token by
token: it takes the new positions alone, and the keys and values of those
before. It costs, for one new position after n others, the attention of one
position to n + 1, where the call costs that of n + 1 to n + 1.

Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
"""

import math
from typing import Any

import keras
from keras import layers, ops

from models.transformer_layers import EPSILON, Shape

# Keys and values, (batch, positions, heads, units of a head) each.
KeysValues = tuple[Any, Any]


class _Attention(layers.Layer):
    """What both kinds of attention are made of.

    Args:
        model_dim: Units of the input and the output.
        num_heads: Heads.
        head_dim: Units of a head's queries, keys and values.
        dropout: Share of the output that is dropped while training, before
            the shortcut is added.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model_dim = model_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.dropout = dropout
        policy = self.dtype_policy
        self.norm = layers.LayerNormalization(epsilon=EPSILON, dtype=policy)
        # Glorot's, of all heads together. Keras's takes a kernel (inputs,
        # heads, units) for a convolution's, and makes it several times smaller.
        limit = math.sqrt(6 / (model_dim + num_heads * head_dim))
        self.attention = layers.MultiHeadAttention(
            num_heads,
            head_dim,
            kernel_initializer=keras.initializers.RandomUniform(-limit, limit),
            dtype=policy,
        )
        self.drop = layers.Dropout(dropout, dtype=policy)

    def project(self, x: Any) -> KeysValues:
        """Keys and values of positions.

        Args:
            x: (batch, positions, `model_dim`).

        Returns:
            Pair of (batch, positions, `num_heads`, `head_dim`).
        """
        dense = self.attention.key_dense, self.attention.value_dense
        keys, values = (_as_one_matrix(layer, x) for layer in dense)
        return keys, values

    def _attend(self, h: Any, cache: KeysValues, visible: Any) -> Any:
        """Attention of normalized positions to known keys and values.

        Args:
            h: (batch, positions, `model_dim`).
            cache: What `project` has returned.
            visible: Boolean, of a shape that broadcasts to (batch, 1,
                positions, positions of `cache`): what may be attended to.

        Returns:
            Tensor like `h`.
        """
        query = _as_one_matrix(self.attention.query_dense, h)
        found = ops.dot_product_attention(query, *cache, mask=visible)
        return _as_one_matrix(self.attention.output_dense, found)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "model_dim": self.model_dim,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "dropout": self.dropout,
        }


@keras.saving.register_keras_serializable(package="models")
class SelfAttention(_Attention):
    """Attention of a sequence to itself.

    Args:
        model_dim: Units of the input and the output.
        num_heads: Heads.
        head_dim: Units of a head's queries, keys and values.
        dropout: Share of the output that is dropped while training, before
            the shortcut is added.
        causal: Whether a position sees only itself and those before.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        causal: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_dim, num_heads, head_dim, dropout, **kwargs)
        self.causal = causal

    def build(self, input_shape: Shape) -> None:
        self.norm.build(input_shape)
        self.attention.build(input_shape, input_shape)

    def call(self, x: Any, visible: Any = None) -> Any:
        """Attends.

        Args:
            x: (batch, length, `model_dim`).
            visible: (batch, length), boolean: the positions that may be
                attended to; all if it is `None`.

        Returns:
            Tensor like `x`.
        """
        h = self.norm(x)
        if visible is not None:
            visible = visible[:, None, None]
        if self.causal:
            before = _visible_before(0, ops.shape(x)[1])
            visible = before if visible is None else visible & before
        return x + self.drop(self._attend(h, self.project(h), visible))

    def empty_cache(self, batch_size: int) -> KeysValues:
        """Keys and values before the first position."""
        shape = (batch_size, 0, self.num_heads, self.head_dim)
        return (
            ops.zeros(shape, self.compute_dtype),
            ops.zeros(shape, self.compute_dtype),
        )

    def step(self, x: Any, cache: KeysValues) -> tuple[Any, KeysValues]:
        """Attends from new positions to those before, and to each other.

        The attention is causal, whatever `causal` says, and nothing is
        dropped.

        Args:
            x: The new positions (batch, new, `model_dim`).
            cache: Keys and values of those before.

        Returns:
            Tensor like `x`, and keys and values of all.
        """
        h = self.norm(x)
        pairs = zip(cache, self.project(h), strict=True)
        keys, values = (ops.concatenate(pair, axis=1) for pair in pairs)
        visible = _visible_before(ops.shape(cache[0])[1], ops.shape(keys)[1])
        found = self._attend(h, (keys, values), visible)
        return x + found, (keys, values)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "causal": self.causal}


@keras.saving.register_keras_serializable(package="models")
class CrossAttention(_Attention):
    """Attention of one sequence to another, the memory.

    The memory is not normalized here. Arguments are those of `SelfAttention`,
    without `causal`.
    """

    def build(self, x_shape: Shape, memory_shape: Shape) -> None:
        self.norm.build(x_shape)
        self.attention.build(x_shape, memory_shape)

    def call(self, x: Any, memory: Any, visible: Any) -> Any:
        """Attends.

        Args:
            x: (batch, length, `model_dim`).
            memory: (batch, memory length, `model_dim`).
            visible: (batch, memory length), boolean: the positions of
                `memory` that may be attended to.

        Returns:
            Tensor like `x`.
        """
        return x + self.drop(
            self._attend(
                self.norm(x), self.project(memory), visible[:, None, None]
            )
        )

    def step(self, x: Any, memory: KeysValues, visible: Any) -> Any:
        """The same, without dropout, for a memory that `project` has seen.

        Args:
            x: New positions (batch, new, `model_dim`).
            memory: The memory's keys and values.
            visible: As in `call`.

        Returns:
            Tensor like `x`.
        """
        return x + self._attend(self.norm(x), memory, visible[:, None, None])

    def compute_output_shape(
        self, x_shape: Shape, memory_shape: Shape
    ) -> Shape:
        del memory_shape
        return x_shape


def _as_one_matrix(dense: layers.EinsumDense, x: Any) -> Any:
    """`dense(x)`, with the positions of all examples as rows of one matrix.

    Of a batch of matrices, Keras makes a product for each, and the gradient of
    the kernel is made for each example before they are added up: (batch, rows
    and columns of the kernel) in memory, and twice the time on a CPU.
    """
    batch, length, *rest = ops.shape(x)
    y = dense(ops.reshape(x, (1, -1, *rest)))
    return ops.reshape(y, (batch, length, *y.shape[2:]))


def _visible_before(start: Any, end: Any) -> Any:
    """What positions from `start` to `end` - 1 see, (1, 1, new, `end`)."""
    seen = ops.arange(end)
    return (seen <= seen[start:, None])[None, None]
