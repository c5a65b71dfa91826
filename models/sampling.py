"""Generates text with a Transformer language model.

Each block keeps the keys and values of the positions before (a cache), so that
a new token costs one position's work, not the whole sequence's. Memory, for n
tokens: 2 n `num_layers` times heads times units of a head, per row.

Rows go through the devices of the layers in as many groups, each with a loop of
its own over tokens. Tokens do not depend on that, but for rounding.
"""

import functools
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
    num_rows, first_new = ids.shape
    length = first_new + num_tokens
    _check_length(length, layers[0].max_length)

    def of_group(ids: Any, first: int, last: int) -> Any:
        def draw(logits: Any, position: Any) -> Any:
            before = (position - first_new) * num_rows + first
            return _draw(logits, temperature, top_k, seed, before)

        return _continued(layers, ids[first:last], length, draw)

    @tf.function(
        input_signature=[tf.TensorSpec((num_rows, None), tf.int32)],
        autograph=False,
    )
    def run(ids: Any) -> Any:
        num_groups = min(decoding.num_devices(layers), num_rows)
        function = functools.partial(of_group, ids)
        return decoding.in_groups(function, num_rows, num_groups)

    return run.get_concrete_function()(ids).numpy()


def _continued(
    layers: Sequence[layers.Layer],
    ids: Any,
    length: int,
    draw: Callable,
) -> Any:
    """Continues rows.

    Args:
        layers: As in `generate`.
        ids: Their prompts.
        length: Tokens of a row, in the end.
        draw: Of logits (rows, vocabulary) and a position, tokens (rows,).
    """
    embedding, *blocks, head = layers
    rows = ids.shape[0]

    def step(ids: Any, position: Any, caches: Any) -> tuple[Any, Any, Any]:
        """Does all from a position on, and adds a token."""
        with decoding.device_of(embedding):
            x = embedding(ids[:, position:], first_position=position)
        found = []
        for block, cache in zip(blocks, caches, strict=True):
            with decoding.device_of(block):
                x, cache = block.step(x, cache)
            found.append(cache)
        end = tf.shape(ids)[1]
        with decoding.device_of(head):
            logits = decoding.at_least_float32(head(x[:, -1:])[:, 0])
            new = draw(logits, end)
        return tf.concat([ids, new[:, None]], 1), end, found

    caches = decoding.empty_caches(blocks, rows)
    ids, *_ = tf.while_loop(
        lambda ids, *_: tf.shape(ids)[1] < length,
        step,
        carried := (ids, tf.constant(0), caches),
        decoding.growing(carried),
        parallel_iterations=1,
    )
    return ids


def _draw(
    logits: Any,
    temperature: float,
    top_k: int | None,
    seed: int,
    before: Any,
) -> Any:
    """Draws a token for each row: (rows, vocabulary) to (rows,), int32.

    One generator draws for all rows of one position after the other: `before`
    is how many rows have been before these.
    """
    rows, vocabulary = logits.shape
    logits, tokens = tf.cast(logits, tf.float64), None
    if top_k is not None and top_k < vocabulary:
        logits, tokens = tf.math.top_k(logits, top_k)
    if temperature > 0:
        # The largest of logits with Gumbel noise is a draw from the softmax.
        noise = tf.numpy_function(
            functools.partial(_noise, seed),
            [before, rows, vocabulary],
            tf.float64,
            stateful=False,
        )
        noise.set_shape((rows, vocabulary))
        if tokens is not None:
            noise = tf.gather(noise, tokens, batch_dims=1)
        logits = logits / temperature + noise
    best = tf.argmax(logits, 1, tf.int32)
    return best if tokens is None else tf.gather(tokens, best, batch_dims=1)


def _noise(seed: int, before: int, rows: int, vocabulary: int) -> np.ndarray:
    """What `np.random.default_rng(seed)` draws after so many rows."""
    bits = np.random.PCG64(seed)
    bits.advance(int(before) * int(vocabulary))  # a step a number
    return np.random.Generator(bits).gumbel(size=(rows, vocabulary))


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
