"""The layers of encoder-decoders; `models.translation` puts them together."""

from typing import Any, ClassVar

import keras
from keras import layers, ops

from models.attention_layers import CrossAttention, KeysValues
from models.transformer_block import TransformerBlock
from models.transformer_layers import EPSILON, Logits, Shape, TokenEmbedding

# Encoder's output, where the source is visible, decoder's output, where the
# target is visible. See `models.translation`.
Boundary = tuple[Any, Any, Any, Any]
BoundaryShape = tuple[Shape, Shape, Shape, Shape]


def _like(inputs: Boundary) -> Boundary:
    """New specs, equal to those of the inputs."""
    return tuple(keras.KerasTensor(x.shape, x.dtype) for x in inputs)


@keras.saving.register_keras_serializable(package="models")
class PairEmbedding(layers.Layer):
    """Token ids of source and target to the first boundary.

    Args:
        vocab_size: Number of token ids. Id 0 is padding.
        model_dim: Units of an embedding. Even.
        max_length: Tokens of the longest source or target.
        dropout: Share of the embeddings that is dropped while training.
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
        self.tokens = TokenEmbedding(
            vocab_size, model_dim, max_length, dropout, dtype=self.dtype_policy
        )

    def build(self, input_shape: tuple[Shape, Shape]) -> None:
        self.tokens.build(input_shape[0])

    def call(self, inputs: tuple[Any, Any]) -> Boundary:
        source, target = inputs
        return (
            self.tokens(source),
            ops.not_equal(source, 0),
            self.tokens(target),
            ops.not_equal(target, 0),
        )

    def compute_output_spec(self, inputs: tuple[Any, Any]) -> Boundary:
        return tuple(
            spec
            for ids in inputs
            for spec in (
                keras.KerasTensor(
                    (*ids.shape, self.model_dim), self.compute_dtype
                ),
                keras.KerasTensor(ids.shape, "bool"),
            )
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "model_dim": self.model_dim,
            "max_length": self.max_length,
            "dropout": self.dropout,
        }


@keras.saving.register_keras_serializable(package="models")
class EncoderLayer(TransformerBlock):
    """Self-attention of the source, then two dense layers.

    Arguments are those of `TransformerBlock`.
    """

    causal: ClassVar[bool] = False

    def build(self, input_shape: BoundaryShape) -> None:
        super().build(input_shape[0])

    def call(self, inputs: Boundary) -> Boundary:
        encoder, visible, *target = inputs
        encoder = self.attention(encoder, visible=visible)
        return self.feed_forward(encoder), visible, *target

    def compute_output_spec(self, inputs: Boundary) -> Boundary:
        return _like(inputs)


@keras.saving.register_keras_serializable(package="models")
class EncoderNorm(layers.Layer):
    """Normalizes the encoder's output, once for all decoder layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization(
            epsilon=EPSILON, dtype=self.dtype_policy
        )

    def build(self, input_shape: BoundaryShape) -> None:
        self.norm.build(input_shape[0])

    def call(self, inputs: Boundary) -> Boundary:
        encoder, *others = inputs
        return self.norm(encoder), *others

    def compute_output_spec(self, inputs: Boundary) -> Boundary:
        return _like(inputs)


@keras.saving.register_keras_serializable(package="models")
class DecoderLayer(TransformerBlock):
    """Causal self-attention, attention to the encoder, two dense layers.

    Arguments are those of `TransformerBlock`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cross_attention = CrossAttention(
            self.model_dim,
            self.num_heads,
            self.head_dim,
            self.dropout,
            dtype=self.dtype_policy,
        )

    def build(self, input_shape: BoundaryShape) -> None:
        encoder, _, decoder, _ = input_shape
        super().build(decoder)
        self.cross_attention.build(decoder, encoder)

    def call(self, inputs: Boundary) -> Boundary:
        encoder, source_visible, decoder, target_visible = inputs
        decoder = self.attention(decoder, visible=target_visible)
        decoder = self.cross_attention(decoder, encoder, source_visible)
        decoder = self.feed_forward(decoder)
        return encoder, source_visible, decoder, target_visible

    def step(
        self, x: Any, cache: KeysValues, memory: KeysValues, visible: Any
    ) -> tuple[Any, KeysValues]:
        """Does new target positions alone.

        Args:
            x: The new positions (batch, new, `model_dim`).
            cache: Keys and values of those before.
            memory: What `cross_attention.project` made of the encoder's
                output.
            visible: Where the source is no padding, (batch, source length).

        Returns:
            Tensor like `x`, and keys and values of all target positions.
        """
        x, cache = self.attention.step(x, cache)
        x = self.cross_attention.step(x, memory, visible)
        return self.feed_forward(x), cache

    def compute_output_spec(self, inputs: Boundary) -> Boundary:
        return _like(inputs)


@keras.saving.register_keras_serializable(package="models")
class TargetLogits(layers.Layer):
    """Logits of the decoder's output; drops the rest of the boundary.

    Args:
        vocab_size: Number of token ids.
        limit: As in `Logits`.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self, vocab_size: int, limit: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.limit = limit
        self.logits = Logits(vocab_size, limit, dtype=self.dtype_policy)

    def build(self, input_shape: BoundaryShape) -> None:
        self.logits.build(input_shape[2])

    def call(self, inputs: Boundary) -> Any:
        return self.logits(inputs[2])

    def compute_output_shape(self, input_shape: BoundaryShape) -> Shape:
        return (*input_shape[2][:-1], self.vocab_size)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "limit": self.limit,
        }
