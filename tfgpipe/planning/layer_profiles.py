"""What was measured of layers, as a record for each of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfgpipe.devices import placement
from tfgpipe.planning.layer_record import LayerProfile
from tfgpipe.planning.layer_size import PlacedStep
from tfgpipe.planning.measure import Found


def layer_profiles(
    placed: Sequence[PlacedStep],
    found: Sequence[Found],
    loss: Found | None,
    num_slot_bytes: Callable[[Any], int],
) -> tuple[list[LayerProfile], LayerProfile | None]:
    """The records of layers, and that of the loss.

    Args:
        placed: The steps.
        found: What was found out about each.
        loss: About the loss, or None.
        num_slot_bytes: What the optimizer keeps for a variable, in bytes.
    """
    seen: set[int] = set()
    layers = []
    for step, own in zip(placed, found, strict=True):
        weights = step.layer.weights
        new = [v for v in weights if id(v) not in seen]
        seen |= {id(v) for v in weights}
        if not weights:  # not built, as an equal one was
            new = own.weights
        layers.append(_record(step.layer.name, own, new, num_slot_bytes))
    row = [*found] if loss is None else [*found, loss]
    kept = [
        {rows: timed.kept for rows, timed in own.timed.items()} for own in row
    ]
    layers += (
        [] if loss is None else [_record("loss", loss, [], num_slot_bytes)]
    )
    for i, layer in enumerate(layers):
        measured = tuple(
            dataclasses.replace(
                one,
                kept_bytes=int(kept_in_row([k[one.rows] for k in kept])[i]),
            )
            for one in layer.measured
        )
        layers[i] = dataclasses.replace(layer, measured=measured)
    return layers[: len(found)], layers[-1] if loss is not None else None


def _record(
    name: str,
    found: Found,
    variables: Sequence[keras.Variable],
    num_slot_bytes: Callable[[Any], int],
) -> LayerProfile:
    trainable = [v for v in variables if v.trainable]
    return LayerProfile(
        name=name,
        key=found.key,
        num_params=sum(math.prod(v.shape) for v in trainable),
        weight_bytes=sum(map(placement.num_bytes, variables)),
        slot_bytes=sum(map(num_slot_bytes, trainable)),
        gradient_bytes=sum(map(placement.num_bytes, trainable)),
        measured=found.measured,
    )


def kept_in_row(kept: Sequence[Any]) -> list[float]:
    """What each of some layers keeps that follow each other.

    What two neighbours keep is the first one's.

    Args:
        kept: For each, what it keeps of its inputs, its outputs and all else.
    """
    found = []
    for i, (inputs, outputs, others) in enumerate(kept):
        behind = kept[i + 1][0] if i + 1 < len(kept) else 0
        before = inputs if i == 0 else 0
        found.append(before + others + max(outputs, behind))
    return found
