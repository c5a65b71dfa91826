"""Functions that run in turn: their caller gets their errors.

A cell's operations are in a function, whose failure cancels what else waits on
its device, before the function's caller hears of it: then the caller only
knows that it was cancelled. Tasks that run one after the other share what they
wait at with the step instead (see `internals.share_rendezvous`), and all
devices get the error itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.failures import check_interruption, setting

_in_turn = contextvars.ContextVar("in_turn", default=False)

_with_step: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def in_turn(is_alone: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, a mini-batch is traced; `is_alone` if no other runs meanwhile."""
    return setting(_in_turn, is_alone)


def traced(
    function: Callable,
    specs: Sequence[Any],
    options: dict[str, Any],
    stays: bool,
) -> Any:
    """Traces a function, whose caller gets its errors if it runs in turn.

    Args:
        function: What it does.
        specs: Of its arguments.
        options: Of `tf.function`.
        stays: Whether it runs where it is called, see `stays_where_called`.
    """
    check_interruption()
    traced_later = tf.function(function, **options)
    if _in_turn.get() and stays:
        internals.share_rendezvous(traced_later)
    return traced_later.get_concrete_function(*specs)


def stays_where_called(specs: Sequence[Any], definition: Any) -> bool:
    """Returns whether all operations of a function run where it is called.

    On another host, some would wait for tensors for ever.

    Args:
        specs: Of its arguments.
        definition: Of the graph with its operations.
    """
    bodies = [
        definition.node,
        *(f.node_def for f in definition.library.function),
    ]
    return not (
        any(spec.dtype == tf.resource for spec in specs)
        or any(node.device for nodes in bodies for node in nodes)
    )


def out_of_turn() -> contextlib.AbstractContextManager[None]:
    """Inside, functions are traced that a device may run at the same time."""
    return setting(_in_turn, False)


def one_step(function: Callable) -> Callable:
    """Runs a mini-batch; in turn, if no other one runs at the same time.

    Steps of one graph, or of a loop, may not wait for each other.
    """

    @functools.wraps(function)
    def running(*args: object) -> Any:
        graph = internals.current_graph()
        if graph is None:
            return function(*args)
        is_alone = graph not in _with_step
        _with_step.add(graph)
        in_loop = internals.in_control_flow(graph, None)
        with setting(_in_turn, _in_turn.get() and is_alone and not in_loop):
            return function(*args)

    return running
