"""A Transformer's block: self-attention, then two dense layers."""

from typing import Any, ClassVar

import keras
from keras import layers

from models.attention_layers import KeysValues, SelfAttention
from models.transformer_layers import FeedForward, Shape


@keras.saving.register_keras_serializable(package="models")
class TransformerBlock(layers.Layer):
    """Causal self-attention, then two dense layers, both with a shortcut.

    Args:
        model_dim: Units of the input and the output.
        num_heads: Heads of the attention.
        head_dim: Units of each.
        hidden_dim: Units between the dense layers.
        feed_forward_scale: Factor of the dense layers' initial kernels.
        dropout: Share of both results that is dropped while training.
        **kwargs: See `keras.layers.Layer`.
    """

    causal: ClassVar[bool] = True

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        head_dim: int,
        hidden_dim: int,
        feed_forward_scale: float = 1.0,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model_dim = model_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.hidden_dim = hidden_dim
        self.feed_forward_scale = feed_forward_scale
        self.dropout = dropout
        policy = self.dtype_policy
        self.attention = SelfAttention(
            model_dim, num_heads, head_dim, dropout, self.causal, dtype=policy
        )
        self.feed_forward = FeedForward(
            model_dim, hidden_dim, feed_forward_scale, dropout, dtype=policy
        )

    def build(self, input_shape: Shape) -> None:
        self.attention.build(input_shape)
        self.feed_forward.build(input_shape)

    def call(self, x: Any) -> Any:
        return self.feed_forward(self.attention(x))

    def empty_cache(self, batch_size: int) -> KeysValues:
        """What `step` takes before the first position."""
        return self.attention.empty_cache(batch_size)

    def step(self, x: Any, cache: KeysValues) -> tuple[Any, KeysValues]:
        """Does new positions alone.

        Args:
            x: The new positions (batch, new, `model_dim`).
            cache: Keys and values of those before.

        Returns:
            Tensor like `x`, and keys and values of all.
        """
        x, cache = self.attention.step(x, cache)
        return self.feed_forward(x), cache

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "model_dim": self.model_dim,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "hidden_dim": self.hidden_dim,
            "feed_forward_scale": self.feed_forward_scale,
            "dropout": self.dropout,
        }
