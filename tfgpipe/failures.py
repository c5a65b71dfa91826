"""Errors and warnings.

Operations are named cell_K/layer_I: `Cell.named_as` turns that into words, also
for equal cells, which share functions.

Warnings come for each model, and not once a process. Python shows a text once
for the line that warns: a second model with a layer of the same name would not
be warned of.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

_LAYER = re.compile(r"\bcell_(\d+)(?:_\d+)?/layer_(\d+)(?:_\d+)?/")

_in_call = contextvars.ContextVar("in_call", default=False)


def explained(
    function: Callable,
    cells: Callable[[], Iterable[Any]],
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable:
    """Says what TensorFlow leaves out when a cell fails at run time.

    Args:
        function: What Keras calls with a mini-batch.
        cells: Tells the model's `Cell`s, which may be made later.
        around: Makes the context in which it runs.
    """

    @functools.wraps(function)
    def explaining(*args: object) -> Any:
        if _in_call.get():  # called by another one
            return function(*args)
        try:
            with around(), setting(_in_call, True):
                return function(*args)
        except tf.errors.CancelledError as error:
            cause = (
                "A layer failed on another device: TensorFlow's log says how, "
                "and `compile(run_eagerly=True)` raises it. Received: "
            )
            text = f"{cause}{error.message}"
            raise type(error)(error.node_def, error.op, text) from error
        except tf.errors.OpError as error:
            # Equal cells run operations of one name.
            for layer in _LAYER.findall(error.message)[-1:]:  # the innermost
                k, i = map(int, layer)
                places = [p for cell in cells() for p in cell.named_as(k, i)]
                add_note(error, f"In {', or its equal '.join(places)}.")
            raise

    return explaining


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Inside, a variable of this context has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def add_note(error: Exception, note: str) -> None:
    """Ends an error with a note, from Python 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def warn(message: str) -> None:
    """Warns, also if the same was said before."""
    warnings.warn_explicit(
        message, UserWarning, "tfgpipe", 0, module="tfgpipe", registry=None
    )


def inform(message: str) -> None:
    """Says what no user needs to act on, in the log named `tfgpipe`."""
    logging.getLogger("tfgpipe").info(message)
