"""Ends a training step that is only being traced.

A step that runs must not be ended: some weights would be updated, and others
not. While Python traces it, nothing has run, and of a large model that takes
longer than clusters wait. So a trace asks, before each layer, function and
task, whether it shall go on. If not, it unwinds as after an error, and what is
to be done then is done outside of all graphs, where variables have the values
that they had before the step.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class TracingEnded(BaseException):
    """Unwinds a trace. No `Exception`, which others would catch."""


class _Offer(NamedTuple):
    is_asked: Callable[[], bool]
    then: Callable[[], None]


_offers: list[_Offer] = []
_in_step = contextvars.ContextVar("in_step", default=False)


def before_step(is_asked: Callable[[], bool], then: Callable[[], None]) -> None:
    """Lets the next training step be ended while it is traced.

    Args:
        is_asked: Whether it shall end; called often.
        then: Called in its place. It must raise an exception.
    """
    _offers[:] = [_Offer(is_asked, then)]


def may_end(in_trial: bool = False) -> None:
    """Ends the trace that this is called from, if that is asked for.

    Args:
        in_trial: Whether layers are tried now, which is before anything runs,
            and outside of graphs.
    """
    is_tracing = in_trial or tf.inside_function()
    if not (_offers and _in_step.get() and is_tracing):
        return
    if _offers[0].is_asked():
        raise TracingEnded


def endable(function: Callable) -> Callable:
    """A training step that may be ended, see `before_step`.

    Args:
        function: What Keras calls with a mini-batch.
    """

    @functools.wraps(function)
    def ending(*args: Any) -> Any:
        token = _in_step.set(True)
        try:
            return function(*args)
        except TracingEnded:
            _offers[0].then()
            raise
        finally:
            _in_step.reset(token)
            _offers.clear()

    return ending
