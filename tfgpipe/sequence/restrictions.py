"""Refuses layers that a pipeline cannot train as Keras would.

By what they are. What only a trace shows is refused where it shows:
`cells/tracer.py`, `state/scope.py`, `state/batch_normalization.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Outline
from tfgpipe.state import is_synchronized


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


def check_model_rows(
    name: str | None, found: Outline, maker: Callable[[Any], str]
) -> None:
    """Refuses a model with outputs that are not one a row.

    What happens to such an axis inside is the model's own: recurrent layers may
    have time first, and rows second. Whether rows mix there, a trial finds.
    `name` is the model's, None for a list; `maker` names the call that makes a
    tensor.

    Raises:
        ValueError: If one has no row for each row of the inputs, or another
            axis that depends on their number.
    """
    # An axis that follows from the rows has another length with others.
    shape_of = _shapes_for(found, _MANY_ROWS)
    other_shape_of = _shapes_for(found, _FEWER_ROWS)
    names = []
    for (path, spec), tensor in zip(
        tree.flatten_with_path(found.output), found.traced.outputs
    ):
        if tensor is None:
            continue
        shape, other = shape_of(tensor), other_shape_of(tensor)
        if shape is None or other is None:
            continue
        if (
            not shape
            or shape[0] not in (None, _MANY_ROWS)
            or shape[1:] != other[1:]
        ):
            text = ".".join(map(str, path))
            names.append(
                f"output {text and repr(text) + ' '}of shape {spec.shape}, "
                f"made by {maker(tensor)}"
            )
    if names:
        of = "" if name is None else f" of model '{name}'"
        raise ValueError(
            "A model must have outputs with a row for each row of the batch, "
            "and no other axis that depends on their number, if there is more "
            f"than one micro-batch. Received: {' and '.join(names)}{of}. "
            "Return what they are computed from, and compute "
            "what needs the whole batch in the loss, or pass "
            "num_micro_batches=1."
        )


def _shapes_for(
    found: Outline, rows: int
) -> Callable[[Any], list[int | None] | None]:
    """Tells the shapes of tensors for so many rows, None if not known."""
    operations = found.traced.operations_for(rows, _ANY_LENGTH)
    if operations is None:  # that length does not suit the model
        operations = found.traced.operations_for(rows, None)
    of_any_rows = all(
        t.shape.rank and t.shape[0] is None
        for t in found.traced.x
        if t is not None
    )

    def shape_of(tensor: Any) -> list[int | None] | None:
        if operations is None or not of_any_rows:
            return None
        sized = operations[tensor.op.name].outputs[tensor.value_index]
        return None if sized.shape.rank is None else sized.shape.as_list()

    return shape_of


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
            "Pass stateful=False, and make the states inputs and outputs of "
            "the model, by `initial_state` and return_state=True: a subclass "
            "of `GPipe` hands them on from batch to batch, see "
            "docs/your_model.md#states-from-batch-to-batch."
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
