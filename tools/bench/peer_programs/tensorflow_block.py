"""A Transformer block in plain TensorFlow operations.

tfgpipe and Lingvo compute this one, so that a difference between their steps is
none of their layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tools.bench.peer_programs import work


def block(weights: Mapping[str, Any], x: Any) -> Any:
    """Attention, then two dense layers, each around a shortcut."""
    x = x + _attention(weights, _normalised(weights, "norm1", x))
    wide = tf.nn.relu(_dense(weights, "wide", _normalised(weights, "norm2", x)))
    return x + _dense(weights, "narrow", wide)


def _normalised(weights: Mapping[str, Any], name: str, x: Any) -> Any:
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
    scaled = centred * tf.math.rsqrt(variance + work.EPSILON)
    return scaled * weights[f"{name}_weight"] + weights[f"{name}_bias"]


def _dense(weights: Mapping[str, Any], name: str, x: Any) -> Any:
    """One product of matrices: positions are rows as examples are."""
    kernel = weights[f"{name}_weight"]
    num_inputs, num_outputs = work.block_shapes()[f"{name}_weight"]
    rows = tf.matmul(tf.reshape(x, [-1, num_inputs]), kernel)
    rows += weights[f"{name}_bias"]
    return tf.reshape(rows, _shape(x, num_outputs))


def _attention(weights: Mapping[str, Any], x: Any) -> Any:
    _, units, num_heads, *_ = work.TRANSFORMER
    head_units = units // num_heads

    def heads(name: str) -> Any:
        split = tf.reshape(
            _dense(weights, name, x),
            [-1, work.TRANSFORMER.positions, num_heads, head_units],
        )
        return tf.transpose(split, [0, 2, 1, 3])  # heads before positions

    query = heads("query") * head_units**-0.5
    scores = tf.matmul(query, heads("key"), transpose_b=True)
    attended = tf.matmul(tf.nn.softmax(scores), heads("value"))
    joined = tf.reshape(tf.transpose(attended, [0, 2, 1, 3]), _shape(x, units))
    return _dense(weights, "output", joined)


def _shape(x: Any, units: int) -> list[int]:
    """Of as many examples as `x`; Lingvo has to see the number."""
    examples = x.shape.as_list()[0]
    return [examples or -1, work.TRANSFORMER.positions, units]
