"""What Transformers are made of, beside attention: layers around Keras's own.

`FeedForward`, as the attention of `models.attention_layers`, is pre-norm and
includes its shortcut: x + dropout(f(norm(x))).

References:

- [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
- [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 5 (scaled
  initial values, clipped logits)
"""

import math
from typing import Any

import keras
import numpy as np
from keras import layers, ops

Shape = tuple[int | None, ...]

EPSILON = 1e-6  # of layer normalizations
_LONGEST_PERIOD = 10_000.0  # of the sinusoids, over 2 pi


def sinusoids(
    first_position: Any, length: Any, model_dim: int, dtype: str
) -> Any:
    """Makes position encodings: sines, then cosines, of falling frequency.

    Args:
        first_position: Where the sequence starts, an integer or a scalar.
        length: Number of positions, an integer or a scalar.
        model_dim: Units of each. Even.
        dtype: What to compute in.

    Returns:
        Tensor (`length`, `model_dim`).

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
    section 3.5
    """
    half = model_dim // 2
    frequencies = _LONGEST_PERIOD ** (-np.arange(half) / half)
    positions = ops.cast(ops.arange(length) + first_position, dtype)
    angles = ops.expand_dims(positions, -1) * ops.cast(frequencies, dtype)
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


@keras.saving.register_keras_serializable(package="models")
class TokenEmbedding(layers.Layer):
    """Token ids to vectors, scaled, with sinusoidal positions added.

    Args:
        vocab_size: Number of token ids.
        model_dim: Units of a vector. Even.
        max_length: Tokens of the longest sequence.
        dropout: Share of the sums that is dropped while training.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self,
        vocab_size: int,
        model_dim: int,
        max_length: int,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.model_dim = model_dim
        self.max_length = max_length
        self.dropout = dropout
        policy = self.dtype_policy
        self.embedding = layers.Embedding(
            vocab_size,
            model_dim,
            keras.initializers.RandomNormal(stddev=model_dim**-0.5),
            dtype=policy,
        )
        self.drop = layers.Dropout(dropout, dtype=policy)

    def build(self, input_shape: Shape) -> None:
        self.embedding.build(input_shape)

    def call(self, ids: Any, first_position: Any = 0) -> Any:
        # (batch, length) -> (batch, length, model_dim)
        if ids.shape[1] is not None and ids.shape[1] > self.max_length:
            raise ValueError(
                "`max_length` must be at least the length of every sequence. "
                f"Received: max_length={self.max_length} and token ids of "
                f"shape {tuple(ids.shape)}. Make the model with a larger one: "
                "it takes no more weights."
            )
        x = self.embedding(ops.cast(ids, "int32"))
        # bfloat16 cannot tell position 257 from 258.
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        positions = sinusoids(
            first_position, ops.shape(ids)[1], self.model_dim, dtype
        )
        scaled = x * math.sqrt(self.model_dim)
        return self.drop(scaled + ops.cast(positions, x.dtype))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape, self.model_dim)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "model_dim": self.model_dim,
            "max_length": self.max_length,
            "dropout": self.dropout,
        }


@keras.saving.register_keras_serializable(package="models")
class FeedForward(layers.Layer):
    """Two dense layers with a ReLU between, pre-norm, with a shortcut.

    Args:
        model_dim: Units of the input and the output.
        hidden_dim: Units between the dense layers.
        scale: Factor of the initial kernels of both dense layers, which
            otherwise are Glorot's. Positive.
        dropout: Share of the output that is dropped while training, before
            the shortcut is added.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        scale: float = 1.0,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model_dim = model_dim
        self.hidden_dim = hidden_dim
        self.scale = scale
        self.dropout = dropout
        policy = self.dtype_policy
        self.norm = layers.LayerNormalization(epsilon=EPSILON, dtype=policy)
        self.wide = self._dense(hidden_dim, "relu")
        self.narrow = self._dense(model_dim, None)
        self.drop = layers.Dropout(dropout, dtype=policy)

    def _dense(self, units: int, activation: str | None) -> layers.Dense:
        # Its scale is one of variances.
        initializer = keras.initializers.VarianceScaling(
            self.scale**2, mode="fan_avg", distribution="uniform"
        )
        return layers.Dense(
            units,
            activation,
            kernel_initializer=initializer,
            dtype=self.dtype_policy,
        )

    def build(self, input_shape: Shape) -> None:
        self.norm.build(input_shape)
        self.wide.build(input_shape)
        self.narrow.build((*input_shape[:-1], self.hidden_dim))

    def call(self, x: Any) -> Any:
        return x + self.drop(self.narrow(self.wide(self.norm(x))))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "model_dim": self.model_dim,
            "hidden_dim": self.hidden_dim,
            "scale": self.scale,
            "dropout": self.dropout,
        }


@keras.saving.register_keras_serializable(package="models")
class Logits(layers.Layer):
    """Layer normalization, then a dense layer over the vocabulary.

    Args:
        vocab_size: Number of token ids.
        limit: Logits beyond +limit or -limit are clipped to it, and pass no
            gradient; `None` for no limit.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self, vocab_size: int, limit: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.limit = limit
        policy = self.dtype_policy
        self.norm = layers.LayerNormalization(epsilon=EPSILON, dtype=policy)
        self.dense = layers.Dense(vocab_size, dtype=policy)

    def build(self, input_shape: Shape) -> None:
        self.norm.build(input_shape)
        self.dense.build(input_shape)

    def call(self, x: Any) -> Any:
        # (batch, length, model_dim) -> (batch, length, vocab_size)
        logits = self.dense(self.norm(x))
        if self.limit is None:
            return logits
        return ops.clip(logits, -self.limit, self.limit)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:-1], self.vocab_size)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "limit": self.limit,
        }
