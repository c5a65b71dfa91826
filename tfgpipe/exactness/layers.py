"""Each layer of a step beside the same layer on the host.

    device     x --> layer --> y --> next layer     as it was rehearsed
               |               |
    host       x --> layer --> y'                    y' beside y

With the gradients that came back on the device, the host has its own:

    device    dx <-- layer <-- dy <-- next layer
    host      dx' <- layer <-- dy                    dx' beside dx
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from tfgpipe.exactness.difference import (
    are_finite,
    compared_dx,
    of_gradients,
    of_outputs,
)
from tfgpipe.exactness.recorder import Call, Place, Recorded, shares_of
from tfgpipe.exactness.replay import Given, Replay, replayed
from tfgpipe.exactness.report import Tally
from tfgpipe.exactness.rows import Rows


class OnHost(NamedTuple):
    """What the layers have come to on the host.

    Attributes:
        dw: Gradients of weights, summed over micro-batches and uses, by id.
        assigned: What Keras makes of variables in the whole mini-batch, by id.
        unknown: ids of those of which that cannot be said.
    """

    dw: dict[int, tf.Tensor]
    assigned: dict[int, tf.Tensor]
    unknown: set[int]


def compare_forward(
    tally: Tally, backward: Tally, recorded: Recorded, is_finite: bool
) -> OnHost:
    """Compares layer after layer, from the first to the last.

    Args:
        tally: Takes the comparisons of the forward pass.
        backward: Takes those of the backward pass.
        recorded: The steps and their calls.
        is_finite: Whether loss and gradients are. If not, the layers are named
            that make the first values that are not.
    """
    dw: dict[int, tf.Tensor] = {}
    rows = Rows(tally, shares_of(recorded))
    before: tuple[Place, list[Call]] | None = None
    for place, calls in recorded:
        if before is not None:
            _compare_transfer(tally, backward, before, (place, calls))
        before = place, calls
        replays = [replayed(place, _given_of(call)) for call in calls]
        if not is_finite:
            _look_for_nonfinite(tally, place, calls)
        difference = max(
            of_outputs(
                [*call.outputs.tensors, *call.losses],
                [*replay.outputs.tensors, *replay.losses],
            )
            for call, replay in zip(calls, replays)
        )
        made = [*calls[0].outputs.tensors, *calls[0].losses]
        limit = place.limit(made)
        tally.note("forward", place.name, "outputs", difference, limit)
        rows.compare(place, calls, replays)
        _compare_dx(backward, place, calls, replays, limit)
        for replay in replays:
            for key, d in replay.dw.items():
                dw[key] = dw[key] + d if key in dw else d
    return OnHost(dw, rows.assigned, rows.unknown)


def _given_of(call: Call) -> Given:
    """What the host is given of a call."""
    return Given(
        call.inputs,
        call.structure,
        call.values,
        lambda _: call.dy,
        call.dlosses,
        [*call.dx],
    )


def _look_for_nonfinite(tally: Tally, place: Place, calls: list[Call]) -> None:
    taken = [t for call in calls for t in call.inputs.tensors]
    made = [t for call in calls for t in call.outputs.tensors]
    if are_finite(taken) and not are_finite(made):
        what = "outputs that are not finite, of inputs that are"
        tally.note("forward", place.name, what, math.inf)


def _compare_transfer(
    tally: Tally,
    backward: Tally,
    before: tuple[Place, list[Call]],
    after: tuple[Place, list[Call]],
) -> None:
    """What a step hands on is what the next one gets, to the bit."""
    (first, firsts), (second, seconds) = before, after
    where = f"{first.name} to {second.name}"
    forward = back = 0.0
    for one, other in zip(firsts, seconds):
        forward = max(
            forward,
            of_outputs(
                [*other.inputs.tensors, *other.inputs.masks],
                [*one.outputs.tensors, *one.outputs.masks],
            ),
        )
        places = [i for i in other.dx if i in one.dy]
        back = max(
            back,
            of_outputs(
                [one.dy[i] for i in places], [other.dx[i] for i in places]
            ),
        )
    tally.note("transfer", where, "what is handed on", forward)
    backward.note("transfer", where, "the gradient on its way back", back)


def _compare_dx(
    tally: Tally,
    place: Place,
    calls: list[Call],
    replays: list[Replay],
    limit: float,
) -> None:
    difference = max(
        of_gradients(*compared_dx(call.dx, replay.dx, call.dy))
        for call, replay in zip(calls, replays)
    )
    if any(call.dx for call in calls):
        what = "gradient with respect to inputs"
        tally.note("gradient", place.name, what, difference, limit)
