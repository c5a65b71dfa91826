"""Traces the functions of cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Tracer:
    """Makes a function that TensorFlow calls as one operation.

    Args:
        eagerly: Leave the functions as they are, for debugging.
        jit_compile: Compile each with XLA. XLA draws other random numbers from
            a seed than TensorFlow does, so it is all functions or none.
    """

    def __init__(self, eagerly: bool, jit_compile: bool):
        self._eagerly = eagerly
        self._options: dict[str, Any] = {"autograph": False}
        if jit_compile:
            self._options["jit_compile"] = True
        else:  # inlined, the calls would lose their place in the schedule
            self._options["experimental_attributes"] = {"_noinline": True}

    def __call__(self, function: Callable, specs: tuple[Any, ...]) -> Callable:
        """Traces `function` for arguments of these `tf.TensorSpec`s."""
        if self._eagerly:
            return function
        traced = tf.function(function, **self._options)
        return traced.get_concrete_function(*specs)
