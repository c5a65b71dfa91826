"""Errors, warnings, and traces that are given up.

A step that is only being traced can be given up. A step that runs must not be
ended: some weights would be updated, and others not. While Python traces it,
nothing has run, and of a large model that takes longer than clusters wait. So a
trace asks, before each layer, function and task, whether it shall go on. If
not, it unwinds as after an error, and what is to be done then is done outside
of all graphs, where variables have the values that they had before the step.

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
import pathlib
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfgpipe import internals

_LAYER = re.compile(r"\bcell_(\d+)(?:_\d+)?/layer_(\d+)(?:_\d+)?/")

_UNKNOWN = re.compile(
    r"Detected at node (\S+) defined at \(most recent call last\):\n"
    r"<stack traces unavailable>\n"
)

# Frames in which no user has written anything.
_INNER = tuple(str(pathlib.Path(f).parent) for f in (__file__, tf.__file__))

_graphs = contextvars.ContextVar["weakref.WeakSet[tf.Graph] | None"](
    "graphs", default=None
)


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
    graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()

    @functools.wraps(function)
    def explaining(*args: object) -> Any:
        if _graphs.get() is not None:  # called by another one
            return function(*args)
        try:
            with around(), setting(_graphs, graphs):
                return function(*args)
        except tf.errors.CancelledError as error:
            raise tf.errors.CancelledError(
                error.node_def,
                error.op,
                "A layer failed on one device, and TensorFlow cancelled the "
                "others. The cause is in its log, unless TF_CPP_MIN_LOG_LEVEL "
                "hides it; `compile(run_eagerly=True)` raises it, and "
                "`compile(steps_per_execution=1)` may. Received: "
                f"{error.message}",
            ) from error
        except tf.errors.OpError as error:
            # Equal cells run operations of one name.
            for layer in _LAYER.findall(error.message)[-1:]:  # the innermost
                k, i = map(int, layer)
                places = [p for cell in cells() for p in cell.named_as(k, i)]
                add_note(error, f"In {', or its equal '.join(places)}.")
            message = _UNKNOWN.sub(_origins(graphs), error.message)
            internals.set_message(error, message)
            raise

    return explaining


def note_source(graph: tf.Graph) -> None:
    """Notes a graph that functions are cut out of.

    What is cut out forgets where in Python its operations came from.
    """
    graphs = _graphs.get()
    if graphs is not None:
        graphs.add(graph)


def _origins(graphs: Iterable[tf.Graph]) -> Callable[[re.Match[str]], str]:
    """Returns what says where in Python operations came from, each once."""
    told: set[str] = set()

    def told_once(words: re.Match[str]) -> str:
        """Returns what replaces TensorFlow's words; they if it is unknown."""
        name = words[1]
        if name in told:
            return ""
        for graph in [*graphs]:
            try:
                frames = graph.get_operation_by_name(name).traceback
            except (KeyError, ValueError):  # another's, or no name
                continue
            told.add(name)
            frames = [f for f in frames if not f.filename.startswith(_INNER)]
            head = words[0].partition("<")[0]
            return head + "".join(traceback.format_list(frames))
        return words[0]

    return told_once


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


class TraceInterrupted(BaseException):
    """Unwinds a trace. No `Exception`, which others would catch."""


_offers: list[tuple[Callable[[], bool], Callable[[], None]]] = []

_in_step = contextvars.ContextVar("in_step", default=False)


def interrupt_next_trace(
    is_asked: Callable[[], bool], then: Callable[[], None]
) -> None:
    """Lets the next training step be ended while it is traced.

    Args:
        is_asked: Whether it shall end; called often.
        then: Called instead. It must raise an exception.
    """
    _offers[:] = [(is_asked, then)]


def check_interruption(in_trial: bool = False) -> None:
    """Ends the trace that this is called from, if that is asked for.

    `in_trial` is whether layers are tried now, which is before anything runs,
    and outside of graphs.
    """
    if _in_step.get() and (in_trial or tf.inside_function()):
        for is_asked, _ in _offers:
            if is_asked():
                raise TraceInterrupted


def interruptible(function: Callable) -> Callable:
    """Lets a training step be ended, see `interrupt_next_trace`."""

    @functools.wraps(function)
    def ending(*args: object) -> Any:
        try:
            with setting(_in_step, True):
                return function(*args)
        except TraceInterrupted:
            for _, then in _offers:
                then()
            raise
        finally:
            _offers.clear()

    return ending


def warn(message: str) -> None:
    """Warns, also if the same was said before."""
    warnings.warn_explicit(
        message, UserWarning, "tfgpipe", 0, module="tfgpipe", registry=None
    )


def inform(message: str) -> None:
    """Says what no user needs to act on, in the log named `tfgpipe`."""
    logging.getLogger("tfgpipe").info(message)
