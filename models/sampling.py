"""Generates text with a Transformer language model.

Each block keeps the keys and values of the positions before (a cache), so that
a new token costs one position's work, not the whole sequence's. Memory, for n
tokens: 2 n `num_layers` times heads times units of a head, per row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import layers

from models import decoding
from models.transformer_block import TransformerBlock
from models.transformer_layers import Logits, TokenEmbedding


def generate(
    layers: Sequence[layers.Layer],
    prompt: Any,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Continues token sequences.

    Args:
        layers: The layers of a model that `models.transformer_lm` made, with
            their weights: `model.layers` of a `tfgpipe.GPipe` or a
            `keras.Sequential`.
        prompt: Token ids (batch, prompt length), integers, without padding.
        num_tokens: Tokens to add. Not negative.
        temperature: What logits are divided by before a token is drawn. Below
            1, likely tokens become more likely; 0 takes the most likely one.
            Not negative.
        top_k: How many of the most likely tokens to draw from; `None` for
            all. Positive.
        seed: What the drawn tokens follow from.

    Returns:
        Token ids (batch, prompt length + `num_tokens`), int32; they begin with
        the prompt.

    Raises:
        ValueError: If an argument is out of range, or the sequence would be
            longer than the model's `max_length`.
    """
    blocks = layers[1:-1]
    decoding.check_layers(
        layers,
        [TokenEmbedding, *[TransformerBlock] * len(blocks), Logits],
        "models.transformer_lm.transformer_lm",
    )
    ids = decoding.checked_ids("prompt", prompt, "batch, prompt length")
    _check(num_tokens, temperature, top_k)
    _check_length(ids.shape[1] + num_tokens, layers[0].max_length)
    random = np.random.default_rng(seed)
    caches = [block.empty_cache(len(ids)) for block in blocks]
    step = _step_of(layers, caches)
    new = ids
    for _ in range(num_tokens):
        position = ids.shape[1] - new.shape[1]
        logits, caches = step(new, position, caches)
        new = _draw(logits.numpy(), temperature, top_k, random)[:, None]
        ids = np.concatenate([ids, new], axis=1)
    return ids


def _step_of(layers: Sequence[layers.Layer], caches: Any) -> Callable:
    """Makes the function that does one step.

    It takes token ids (batch, new), the position of the first of them, and the
    caches, and returns logits of what comes next (batch, vocabulary), in
    float32 at least, and the caches.
    """
    embedding, *blocks, head = layers

    def step(ids: Any, position: Any, caches: Any) -> tuple[Any, Any]:
        with decoding.device_of(embedding):
            x = embedding(ids, first_position=position)
        found = []
        for block, cache in zip(blocks, caches, strict=True):
            with decoding.device_of(block):
                x, cache = block.step(x, cache)
            found.append(cache)
        with decoding.device_of(head):
            logits = head(x[:, -1:])[:, 0]
        return decoding.at_least_float32(logits), found

    signature = [
        tf.TensorSpec((None, None), tf.int32),
        tf.TensorSpec((), tf.int32),
        decoding.specs(caches, num_unknown=2),
    ]
    return tf.function(step, input_signature=signature, autograph=False)


def _draw(
    logits: np.ndarray,
    temperature: float,
    top_k: int | None,
    random: np.random.Generator,
) -> np.ndarray:
    """Draws a token for each row: (batch, vocabulary) to (batch,), int32."""
    logits = logits.astype(np.float64)
    if top_k is not None and top_k < logits.shape[1]:
        order = np.argsort(-logits, axis=1, kind="stable")
        np.put_along_axis(logits, order[:, top_k:], -np.inf, axis=1)
    if temperature > 0:
        # The largest of logits with Gumbel noise is a draw from the softmax.
        logits = logits / temperature + random.gumbel(size=logits.shape)
    return np.argmax(logits, axis=1).astype(np.int32)


def _check(num_tokens: int, temperature: float, top_k: int | None) -> None:
    problems = []
    if num_tokens < 0:
        problems.append(
            f"`num_tokens` must not be negative. Received: {num_tokens=}."
        )
    if not temperature >= 0:
        problems.append(
            f"`temperature` must not be negative. Received: {temperature=}."
        )
    if top_k is not None and top_k < 1:
        problems.append(
            f"`top_k` must be positive. Received: {top_k=}. "
            "Pass None to draw from all tokens."
        )
    if problems:
        raise ValueError("\n".join(problems))


def _check_length(length: int, max_length: int) -> None:
    if length > max_length:
        raise ValueError(
            "`num_tokens` must leave the sequence within the model's "
            f"`max_length`. Expected a length of at most {max_length}. "
            f"Received: {length} with the prompt. Ask for fewer tokens, or "
            "shorten the prompt."
        )
