"""Which slices of a sparse gradient belong to rows.

A lookup by tokens gives a slice for each row and token: the slices of a
mini-batch are those of its micro-batches, one after the other. A lookup by
positions gives a slice for each position, the sum over the rows: there the
slices of the micro-batches are added up. Keras's optimizers do not merge slices
of equal indices, so they tell the difference. Which it is shows when the layer
is run on all rows and on parts of them:

    tokens      whole 4 7 7 2 4    parts 4 7 | 7 2 4      one after the other
    positions   whole 0 1 2        parts 0 1 2 | 0 1 2    the same: repeated
    others      whole 2 4 7        parts 4 7 | 2 4 7      neither
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe.cells import Boundary, lookups, structure_of
from tfgpipe.trial.outcome import Given, Outcome, TriedStep, differentiated


def look_up(
    tried: TriedStep,
    given: Sequence[Given],
    axes: Sequence[int],
    varying: Sequence[keras.Variable],
) -> tuple[dict[int, list[bool]], list[Any]]:
    """Finds out which lookups of a step are repeated.

    Args:
        tried: The step.
        given: What it takes: of all rows, and of each part.
        axes: For each output that of the rows.
        varying: State that micro-batches have assigned otherwise.

    Returns:
        By the ids of weights, for each lookup whether it is repeated; and the
        weights of which slices are neither kept apart nor repeated.
    """
    found = [_slices(tried, g, axes) for g in given]
    later = _slices(tried, given[0], axes, tried.later(varying), times=2)
    repeated: dict[int, list[bool]] = {}
    odd = []
    for key, (variable, whole) in found[0].items():
        parts = [own[key][1] for own in found[1:]]
        kinds = [_kind(*own) for own in zip(whole, *parts)]
        for lookup, (one, other) in enumerate(zip(whole, later[key][1])):
            if not np.array_equal(one, other):
                kinds[lookup] = False  # each micro-batch has its own
        counts = {len(whole), *map(len, parts)}
        if None in kinds or len(counts) > 1:
            odd.append(variable)
        repeated[key] = [kind is True for kind in kinds]
    return repeated, odd


def are_by_rows(made: Sequence[Outcome]) -> bool:
    """Whether all slices are shown to be those of rows, by their indices."""
    for key, (_, d) in made[0].dw.items():
        found = [d, *(own.dw[key][1] for own in made[1:])]
        if not isinstance(d, tf.IndexedSlices):
            continue
        if not all(isinstance(own, tf.IndexedSlices) for own in found):
            return False
        whole, *parts = (own.indices.numpy() for own in found)
        if not np.array_equal(whole, np.concatenate(parts)):
            return False
    return True


def _kind(whole: Any, *parts: Any) -> bool | None:
    """Whether it is repeated; None if it is neither that nor by rows."""
    if np.array_equal(whole, np.concatenate(parts)):
        return False
    return True if all(np.array_equal(whole, p) for p in parts) else None


def _slices(
    tried: TriedStep,
    given: Given,
    axes: Sequence[int],
    more: Sequence[Any] = (),
    times: int = 1,
) -> dict[int, tuple[Any, list[Any]]]:
    """By ids of weights the indices of each lookup.

    In a graph, as in a step: there TensorFlow shows lookups one by one. What
    is drawn by no seed of Keras's is other in a second run.
    """
    flat, masks = Boundary.of(given.nest)
    structure = structure_of(given.nest)
    variables: list[Any] = []

    def indices(tensors: list[Any], masks: list[Any]) -> list[Any]:
        nest = Boundary(tensors, masks).nest(structure)
        run = tried.run(given._replace(nest=nest), True, more)
        made = differentiated(run, axes)
        sparse = [
            (v, lookups(d))
            for v, d in made.dw.values()
            if isinstance(d, tf.IndexedSlices)
        ]
        variables[:] = [v for v, _ in sparse]
        return [[part.indices for part in parts] for _, parts in sparse]

    function = tf.function(indices, autograph=False)
    for _ in range(times):
        made = function(flat, masks)
    return {
        id(v): (v, [i.numpy() for i in own]) for v, own in zip(variables, made)
    }
