"""Decodes with an encoder-decoder, one target position at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import layers, ops

from models import decoding
from models.translation_layers import (
    DecoderLayer,
    EncoderLayer,
    EncoderNorm,
    PairEmbedding,
    TargetLogits,
)

_PADDING = 0


class TranslationDecoder:
    """A translation model, as the functions that a beam search is made of.

    Args:
        layers: The layers of a model that `models.translation` made, with
            their weights.
        bos_id: Token id that every target begins with.
        beam_size: Rows of each sentence.

    Attributes:
        max_length: Tokens of the longest source or target.
        vocab_size: Number of token ids.

    Raises:
        ValueError: If the layers are not those of a translation model.
    """

    def __init__(
        self, layers: Sequence[layers.Layer], bos_id: int, beam_size: int
    ) -> None:
        num_layers = (len(layers) - 3) // 2
        decoding.check_layers(
            layers,
            [
                PairEmbedding,
                *[EncoderLayer] * num_layers,
                EncoderNorm,
                *[DecoderLayer] * num_layers,
                TargetLogits,
            ],
            "models.translation.translation",
        )
        self._encoders = layers[: num_layers + 2]
        self._decoders = layers[num_layers + 2 : -1]
        self._embedding, self._head = layers[0], layers[-1]
        self.max_length = self._embedding.max_length
        self.vocab_size = self._head.vocab_size
        self._bos_id = bos_id
        self._beam_size = beam_size

    def empty_caches(self, num_rows: Any) -> list[Any]:
        """Keys and values of each decoder layer before the first position."""
        return decoding.empty_caches(self._decoders, num_rows)

    def encode(self, source: Any) -> tuple[list[Any], Any]:
        """Encodes a batch.

        Args:
            source: Token ids (batch, source length).

        Returns:
            For each decoder layer the keys and values of the encoder's output,
            and where they are visible; each row `beam_size` times.
        """
        begin = ops.full((ops.shape(source)[0], 1), self._bos_id, "int32")
        boundary = source, begin
        for layer in self._encoders:
            with decoding.device_of(layer):
                boundary = layer(boundary)
        encoder, visible, *_ = boundary
        memory = []
        for layer in self._decoders:
            with decoding.device_of(layer):
                pair = layer.cross_attention.project(encoder)
                memory.append(tuple(self._for_beams(x) for x in pair))
        return memory, self._for_beams(visible)

    def _for_beams(self, x: Any) -> Any:
        return ops.repeat(x, self._beam_size, axis=0)

    def step(
        self,
        ids: Any,
        position: Any,
        caches: Any,
        memory: Any,
        visible: Any,
    ) -> tuple[Any, Any, Any]:
        """Does one target position.

        Args:
            ids: The tokens there (rows, 1).
            position: Its number.
            caches: Keys and values of the positions before.
            memory: As `encode` returned it.
            visible: Likewise.

        Returns:
            Log-probabilities of the most probable next tokens, best first
            (rows, some), the tokens, and the caches.
        """
        with decoding.device_of(self._embedding):
            x = self._embedding.tokens(ids, first_position=position)
        found = []
        for layer, cache, own in zip(
            self._decoders, caches, memory, strict=True
        ):
            with decoding.device_of(layer):
                x, cache = layer.step(x, cache, own, visible)
            found.append(cache)
        with decoding.device_of(self._head):
            logits = decoding.at_least_float32(self._head.logits(x)[:, 0])
            log_probs = ops.log_softmax(logits)
            is_padding = ops.arange(self.vocab_size) == _PADDING
            log_probs = ops.where(is_padding, -np.inf, log_probs)
            count = min(2 * self._beam_size, self.vocab_size)
            return *ops.top_k(log_probs, count), found
