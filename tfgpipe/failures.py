"""Errors that TensorFlow raises while a step runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def explained(function: Callable) -> Callable:
    """Says what TensorFlow leaves out when a cell fails at run time."""

    @functools.wraps(function)
    def explaining(*args: Any) -> Any:
        try:
            return function(*args)
        except tf.errors.CancelledError as error:
            raise tf.errors.CancelledError(
                error.node_def,
                error.op,
                "A layer failed on one device, and TensorFlow reports that it "
                "cancelled the others. The cause is in TensorFlow's log, "
                "unless TF_CPP_MIN_LOG_LEVEL hides it; "
                "`compile(run_eagerly=True)` raises it. Received: "
                f"{error.message}",
            ) from error

    return explaining
