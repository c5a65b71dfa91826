"""Errors that TensorFlow raises while a step runs.

A cell's operations are in a function, whose failure cancels what else waits on
its device, before the function's caller hears of it: then the caller only
knows that it was cancelled. Tasks share what they wait at with the step instead
(see `internals.share_rendezvous`), and all devices get the error itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import pathlib
import re
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.ending import may_end

_LAYER = re.compile(r"\bcell_(\d+)(?:_\d+)?/layer_(\d+)(?:_\d+)?/")
_UNKNOWN = re.compile(
    r"Detected at node (\S+) defined at \(most recent call last\):\n"
    r"<stack traces unavailable>\n"
)
# Frames in which no user has written anything.
_INNER = tuple(str(pathlib.Path(f).parent) for f in (__file__, tf.__file__))
_in_turn = contextvars.ContextVar("in_turn", default=False)
_graphs = contextvars.ContextVar[Any]("graphs", default=None)
_with_step: weakref.WeakSet[Any] = weakref.WeakSet()


def explained(
    function: Callable, cells: Sequence[Any], is_alone: bool
) -> Callable:
    """Says what TensorFlow leaves out when a cell fails at run time.

    Args:
        function: What Keras calls with a mini-batch.
        cells: The model's `Cell`s.
        is_alone: Whether a call of it runs one step.
    """
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(function)
    def explaining(*args: Any) -> Any:
        if _graphs.get() is not None:  # called by another one
            return function(*args)
        try:
            with _set(_in_turn, is_alone), _set(_graphs, graphs):
                return function(*args)
        except tf.errors.CancelledError as error:
            raise tf.errors.CancelledError(
                error.node_def,
                error.op,
                "A layer failed on one device, and TensorFlow reports that it "
                "cancelled the others. The cause is in TensorFlow's log, "
                "unless TF_CPP_MIN_LOG_LEVEL hides it; "
                "`compile(run_eagerly=True)` raises it, and "
                "`compile(steps_per_execution=1)` may. Received: "
                f"{error.message}",
            ) from error
        except tf.errors.OpError as error:
            _name_layer(error, cells)
            message = _UNKNOWN.sub(_Origins(graphs), error.message)
            internals.set_message(error, message)
            raise

    return explaining


def note_source(graph: Any) -> None:
    """Notes a graph that functions are cut out of.

    What is cut out forgets where in Python its operations came from.
    """
    graphs = _graphs.get()
    if graphs is not None:
        graphs.add(graph)


class _Origins:
    """Says where in Python an operation came from that failed, once.

    Args:
        graphs: In which its like may be.
    """

    def __init__(self, graphs: Iterable[Any]) -> None:
        self._graphs = list(graphs)
        self._told: set[str] = set()

    def __call__(self, found: re.Match[str]) -> str:
        """What replaces TensorFlow's words; they stay if it is not known."""
        name = found[1]
        if name in self._told:
            return ""
        for graph in self._graphs:
            try:
                frames = graph.get_operation_by_name(name).traceback
            except (KeyError, ValueError):  # another's, or no name
                continue
            self._told.add(name)
            lines = traceback.format_list(
                [f for f in frames if not f.filename.startswith(_INNER)]
            )
            head, _, _ = found[0].partition("<")
            return head + "".join(lines)
        return found[0]


def traced(
    function: Callable,
    specs: Sequence[Any],
    options: dict[str, Any],
    stays: bool,
) -> Any:
    """A concrete function, whose caller gets its errors if it runs in turn.

    Args:
        function: What it does.
        specs: Of its arguments.
        options: Of `tf.function`.
        stays: Whether it runs where it is called, see `stays_where_called`.
    """
    may_end()
    found = tf.function(function, **options)
    if _in_turn.get() and stays:
        internals.share_rendezvous(found)
    return found.get_concrete_function(*specs)


def stays_where_called(specs: Sequence[Any], definition: Any) -> bool:
    """Whether all operations of a function run where it is called.

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
    return _set(_in_turn, False)


def one_step(function: Callable) -> Callable:
    """Runs a mini-batch; in turn, if no other one runs at the same time.

    Steps of one graph, or those of a loop, may not wait for each other.
    """

    @functools.wraps(function)
    def running(*args: Any) -> Any:
        graph = internals.current_graph()
        if graph is None:
            return function(*args)
        is_alone = graph not in _with_step
        _with_step.add(graph)
        in_loop = internals.in_control_flow(graph, None)
        with _set(_in_turn, _in_turn.get() and is_alone and not in_loop):
            return function(*args)

    return running


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def add_note(error: Exception, note: str) -> None:
    """Ends an error with a note, from Python 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def _name_layer(error: tf.errors.OpError, cells: Sequence[Any]) -> None:
    """Notes where the layer is whose operation failed.

    Equal cells run operations of one name.
    """
    found = _LAYER.search(error.message)
    if found is not None:
        k, i = map(int, found.groups())
        places = [
            cell.describe(cell.sequence[i])
            for cell in cells
            if k in cell.traced_as
        ]
        add_note(error, f"In {', or its equal '.join(places)}.")
