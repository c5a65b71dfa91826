"""Refuses layers that a pipeline cannot train as Keras would.

By what they are. What only a trace shows is refused where it shows:
`cells/tracer.py`, `state/scope.py`, `state/batch_normalization.py`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.costs import cost as cost_lib
from tfgpipe.state import is_synchronized
from tfgpipe.trial import calls_undone


def check_supported(
    layers: Sequence[keras.layers.Layer],
    num_micro_batches: int,
    num_replicas: int = 1,
) -> None:
    """Refuses layers that a pipeline would change the meaning of.

    What a layer makes when it is built is not seen before.

    Raises:
        ValueError: If there is one.
    """
    for layer in layers:
        for inner in internals.flat_layers(layer):
            if reason := _unsupported(inner, num_micro_batches, num_replicas):
                raise ValueError(
                    "A layer must treat micro-batches as it treats their "
                    f"mini-batch. Received: layer '{inner.name}' with {reason}"
                )


_MANY_ROWS = 7919  # a prime, which no other axis has

_FEWER_ROWS = 7907  # another one

_ANY_LENGTH = 8


def check_rows_stay(
    layer: keras.layers.Layer, inputs: Any, outputs: Any, is_last: bool
) -> None:
    """Refuses a layer that makes rows part of another axis.

    As the similarities of all rows with all rows are. It is asked again, with a
    known number of rows, if an axis of its outputs has an unknown length and
    none of its inputs, or if it is the last layer. The model has more than one
    micro-batch; inputs and outputs are nests of specs.

    Raises:
        ValueError: If it does so, or if a last layer's outputs do not have a
            row for each row of the inputs.
    """
    given, made = tree.flatten(inputs), tree.flatten(outputs)
    made = [t for t in made if t is not None]
    rows = next((t.shape[0] for t in given if t is not None and t.shape), None)
    constant = any(not t.shape or t.shape[0] not in (None, rows) for t in made)
    if is_last and constant:
        _refuse_rows(layer, made)
    unknown = [None in t.shape[1:] for t in given if t is not None]
    if not any(None in t.shape[1:] for t in made):
        return
    if any(unknown) and not is_last:
        return

    try:
        found = layer(cost_lib.example_of(inputs, _MANY_ROWS, _ANY_LENGTH))
    except Exception:
        return  # that length does not suit the layer
    shapes = [t.shape for t in tree.flatten(found) if t is not None]
    if any(d and d % _MANY_ROWS == 0 for s in shapes for d in s[1:]):
        _refuse_rows(layer, made)


def check_mask_is_one(
    layer: keras.layers.Layer,
    inputs: Any,
    outputs: Any,
    following: Sequence[keras.layers.Layer],
) -> None:
    """Refuses a layer that hands a mask on or says so, and not both.

    Keras does not ask `compute_mask` where what `call` returns has a mask, as
    the tensor that came in has. But in the graph of a `keras.Sequential` it
    has, and hands what it says to layers that take a `mask`. `inputs` and
    `outputs` are nests of specs.

    Raises:
        ValueError: If it does so, and a following layer takes a mask.
    """
    specs = [t for t in tree.flatten(inputs) if t is not None]
    masks = [internals.get_mask(spec) for spec in specs]
    said = [internals.get_mask(spec) for spec in tree.flatten(outputs)]
    is_own = not internals.is_keras(type(layer).call)
    if (
        len(specs) != 1
        or masks == [None]
        or all(mask is None for mask in said)
        or not (is_own or isinstance(layer, keras.layers.Lambda))
        or not any(map(_takes_mask, following))
    ):
        return
    are_two = False

    def run(x: Any, mask: Any) -> None:
        nonlocal are_two
        internals.set_mask(x, mask)
        made = [internals.get_mask(t) for t in tree.flatten(layer(x))]
        told = tree.flatten(layer.compute_mask(x, mask))
        # Two new ones may be equal; the one that came in is another.
        are_two = None not in made and any(
            (own is mask) != (other is mask) for own, other in zip(made, told)
        )

    with (
        calls_undone([layer]),
        contextlib.suppress(Exception),  # a user's code may raise anything
    ):
        internals.output_spec(run, specs[0], masks[0])
    if are_two:
        raise ValueError(
            "The outputs of a layer must have the mask that its `compute_mask` "
            f"returns. Received: layer '{layer.name}', which returns a tensor "
            "that has another one already, so that Keras gives layers the one "
            "or the other. Return a new tensor, as `keras.ops.copy(x)` is, or "
            "pass a functional model."
        )


def _takes_mask(layer: keras.layers.Layer) -> bool:
    return "mask" in inspect.signature(layer.call).parameters


def check_model_rows(
    model: keras.Model,
    made: Sequence[keras.KerasTensor],
    makers: Sequence[str],
) -> None:
    """Refuses a functional model with outputs that are not one a row.

    It is asked with two numbers of rows if some tensor in it has an axis that
    may have become as long as the batch. What happens to such an axis inside is
    the model's own: recurrent layers may have time first, and rows second.
    `made` are specs of what the calls in it make; `makers` names the call that
    makes each output.

    Raises:
        ValueError: If one has no row for each row of the inputs, or another
            axis that depends on their number.
    """
    outputs = model.outputs
    wrong = [not t.shape or t.shape[0] is not None for t in outputs]
    if not any(wrong) and any(None in t.shape[1:] for t in made):
        # An axis that follows from the rows has another length with others.
        counts = _MANY_ROWS, _FEWER_ROWS
        given = (
            cost_lib.example_of(model.input, count, _ANY_LENGTH)
            for count in counts
        )
        try:
            first, second = (
                tree.flatten(internals.output_spec(model, x)) for x in given
            )
        except Exception:
            return  # those lengths do not suit the model
        wrong = [
            a.shape[0] not in (None, counts[0]) or a.shape[1:] != b.shape[1:]
            for a, b in zip(first, second)
        ]
    named = tree.flatten_with_path(model.output)
    paths = [".".join(map(str, path)) for path, _ in named]
    names = [
        f"output {path and repr(path) + ' '}of shape {t.shape}, made by {maker}"
        for path, t, maker, is_wrong in zip(paths, outputs, makers, wrong)
        if is_wrong
    ]
    if names:
        raise ValueError(
            "A model must have outputs with a row for each row of the batch, "
            "and no other axis that depends on their number, if there is more "
            f"than one micro-batch. Received: {' and '.join(names)} of model "
            f"'{model.name}'. Return what they are computed from, and compute "
            "what needs the whole batch in the loss, or pass "
            "num_micro_batches=1."
        )


def _refuse_rows(layer: keras.layers.Layer, outputs: list[Any]) -> None:
    raise ValueError(
        "A layer must have outputs with a row for each row of the batch, and "
        "no other axis as long as the batch, if there is more than one "
        f"micro-batch. Received: layer '{layer.name}' with outputs of shape "
        f"{[tuple(t.shape) for t in outputs]}. Compute what needs the whole "
        "batch in the loss, or pass num_micro_batches=1."
    )


def _unsupported(
    layer: keras.layers.Layer, num_micro_batches: int, num_replicas: int
) -> str | None:
    """What of the layer does not go with a pipeline, or None."""
    is_split = num_micro_batches * num_replicas > 1
    if is_split and getattr(layer, "renorm", False) is True:
        return (
            "renorm=True, which normalises by its moving statistics, and "
            f"num_micro_batches={num_micro_batches}"
            + (f" in {num_replicas} replicas" if num_replicas > 1 else "")
            + ". Pass renorm=False, or num_micro_batches=1"
            + (" and no replicas." if num_replicas > 1 else ".")
        )
    if num_replicas > 1 and is_synchronized(layer) and _is_foreign(layer):
        return (
            "synchronized=True, which takes moments over replicas, and "
            f"{num_replicas} replicas. Pass synchronized=False, or use a "
            "`keras.layers.BatchNormalization`, which computes its moments "
            "in Keras's way."
        )
    if getattr(layer, "stateful", False) is True:
        return (
            "stateful=True, which keeps a state for every row of a batch. "
            "Pass stateful=False."
        )
    if internals.remat_mode(layer) is not None:
        return (
            "a `keras.RematScope` around it, which recomputes the layer in "
            "its own way. Make the layer outside of the scope, and choose "
            "what is recomputed with `remat`."
        )
    return None


def _is_foreign(layer: keras.layers.Layer) -> bool:
    """Whether nothing is known of how a layer computes moments."""
    known = isinstance(layer, keras.layers.BatchNormalization)
    return not known or internals.has_own_moments(layer)
