"""Each layer beside the host, and its micro-batches beside the whole.

    device     x --> layer --> y --> next layer     as it was rehearsed
               |               |
    host       x --> layer --> y'                    y' beside y

With the gradients that came back on the device, the host has its own:

    device    dx <-- layer <-- dy <-- next layer
    host      dx' <- layer <-- dy                    dx' beside dx

The micro-batches of a layer are computed one by one, and all at once:

    host    x0 --> layer --> y0
            x1 --> layer --> y1      y0, y1, y2 beside the rows of y
            x2 --> layer --> y2
            x  --> layer --> y       as Keras does without micro-batches

Two things differ by what the guide says: batch normalisation, by the moments
that it takes, and random numbers. Whether that is all of it shows when only
rows of other micro-batches change:

    x0, x1, x2 --> layer --> y       with its moments and its seeds
    x0, x0, x0 --> layer --> y'      with the same: y0' must be y0

Limit: the state of a layer that draws, or holds several batch normalisations,
follows from what differs: of that, nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import Boundary
from tfgpipe.exactness.recorder import (
    LayerPlace,
    Recorded,
    Replay,
    axes_of,
    first_axes,
    first_repeated,
    first_rows,
    joined,
    joined_gradients,
    replayed,
    shares_of,
    summed,
)
from tfgpipe.exactness.report import (
    Tally,
    are_finite,
    compared_dx,
    of_gradients,
    of_outputs,
    without_tiny,
)
from tfgpipe.model import LayerRun


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

    `backward` takes the comparisons of the backward pass. Unless loss and
    gradients are finite, the layers are named that make the first values that
    are not.
    """
    dw: dict[int, tf.Tensor] = {}
    rows = Rows(tally, shares_of(recorded))
    before: tuple[LayerPlace, list[LayerRun]] | None = None
    #     devices   x0 -> [0] -> x1 -> [1] -> x2
    #     host      x0 -> [0] -> ?  ;  x1 -> [1] -> ?
    #
    # The host begins each layer with what came in on the device, so that a
    # difference is this layer's own.
    for place, calls in recorded:
        if before is not None:
            _compare_transfer(tally, backward, before, (place, calls))
        before = place, calls
        replays = [replayed(place, call) for call in calls]
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


def _look_for_nonfinite(
    tally: Tally, place: LayerPlace, calls: list[LayerRun]
) -> None:
    taken = [t for call in calls for t in call.inputs.tensors]
    made = [t for call in calls for t in call.outputs.tensors]
    if are_finite(taken) and not are_finite(made):
        what = "outputs that are not finite, of inputs that are"
        tally.note("forward", place.name, what, math.inf)


def _compare_transfer(
    tally: Tally,
    backward: Tally,
    before: tuple[LayerPlace, list[LayerRun]],
    after: tuple[LayerPlace, list[LayerRun]],
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
    place: LayerPlace,
    calls: list[LayerRun],
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


class _Layer(NamedTuple):
    """A layer on the host, by micro-batches and on all rows at once.

    Attributes:
        calls: Its calls on its device.
        parts: The same on the host.
        given: The first of them, given all rows.
        whole: What it makes of that.
        axes_in: Along which axes the rows of its inputs are.
        axes_out: Those of its outputs.
    """

    place: LayerPlace
    calls: list[LayerRun]
    parts: list[Replay]
    given: LayerRun
    whole: Replay
    axes_in: Boundary
    axes_out: Boundary

    @property
    def limit(self) -> float:
        """Up to where differences are rounding."""
        return self.place.limit(self.whole.outputs.tensors, on_host=True)


def _joined_dy(calls: list[LayerRun], outputs: Boundary) -> dict[int, Any]:
    """The gradients with respect to outputs of all rows."""
    axes = axes_of([call.outputs for call in calls], outputs).tensors
    return {
        i: joined_gradients([call.dy[i] for call in calls], axes[i])
        for i in calls[0].dy
    }


class Rows:
    """Compares layer after layer, in order.

    Attributes:
        assigned: What Keras makes of variables in the whole mini-batch, by id.
        unknown: ids of those of which that cannot be said.
    """

    def __init__(self, tally: Tally, shares: Sequence[float]):
        self._tally = tally
        self._shares = shares
        self._axes: Boundary | None = None  # of what comes into the next layer
        self.assigned: dict[int, tf.Tensor] = {}
        self.unknown: set[int] = set()

    def compare(
        self, place: LayerPlace, calls: list[LayerRun], parts: list[Replay]
    ) -> None:
        """Compares what micro-batches came to with the whole mini-batch."""
        if len(calls) == 1:
            self._take_assigned(place, parts[0], is_comparable=True)
            return
        axes = self._axes or first_axes(calls[0].inputs)
        given = self._whole(place, calls, axes)
        moments: list[Any] = []
        with internals.recording_moments(
            place.normalizations, lambda *found: moments.append(found[3:])
        ):
            whole = replayed(place, given, lambda y: _joined_dy(calls, y))
        self._axes = axes_of([part.outputs for part in parts], whole.outputs)
        one = _Layer(place, calls, parts, given, whole, axes, self._axes)
        # What micro-batches do otherwise on purpose, as the guide says.
        reasons = [
            *(["the moments of each micro-batch"] if moments else []),
            *(["random numbers for each micro-batch"] if place.draws else []),
        ]
        self._compare_outputs(one, " and ".join(reasons))
        if reasons:
            self._compare_first(one, moments)
        else:
            self._compare_gradients(one)
        self._take_assigned(place, whole, is_comparable=not reasons)

    def _whole(
        self, place: LayerPlace, calls: list[LayerRun], axes: Boundary
    ) -> LayerRun:
        """The first call, given all rows at once."""
        first = calls[0]
        return first._replace(
            inputs=joined([call.inputs for call in calls], axes),
            state=[
                self.assigned.get(id(v), value)
                for v, value in zip(place.state, first.state)
            ],
            dlosses={
                i: summed([call.dlosses[i] for call in calls])
                for i in first.dlosses
            },
        )

    def _compare_outputs(self, one: _Layer, reasons: str) -> None:
        # M x (rows / M, ...) -> (rows, ...), beside all rows at once.
        found = joined([part.outputs for part in one.parts], one.axes_out)
        expected = one.whole.outputs
        what = "outputs"
        self._note(
            one,
            f"{what}, by {reasons}" if reasons else what,
            of_outputs(
                [*found.tensors, *found.masks],
                [*expected.tensors, *expected.masks],
            ),
            is_documented=bool(reasons),
        )
        if one.whole.losses:
            means = [
                sum(
                    a * tf.cast(b, "float64") for a, b in zip(self._shares, own)
                )
                for own in zip(*(part.losses for part in one.parts))
            ]
            difference = of_outputs(means, one.whole.losses)
            what = "what it adds to the loss"
            self._note(one, what, difference, is_documented=bool(reasons))

    def _compare_first(self, one: _Layer, moments: list[Any]) -> None:
        """The first micro-batch, when the rows of others change."""
        first = one.parts[0].outputs
        changed = one.given._replace(
            inputs=first_repeated(
                one.given.inputs, one.calls[0].inputs, one.axes_in
            ),
            dy={},
            dlosses={},
            dx={},
        )
        left = iter(moments)
        with internals.recording_moments(
            one.place.normalizations, lambda *_: None, lambda *_: next(left)
        ):
            again = replayed(one.place, changed)
        self._note(
            one,
            "outputs, by the rows of other micro-batches",
            of_outputs(
                first_rows(again.outputs, first, one.axes_out),
                first_rows(one.whole.outputs, first, one.axes_out),
            ),
        )

    def _compare_gradients(self, one: _Layer) -> None:
        axes, whole = one.axes_in.tensors, one.whole
        dx = {
            i: joined_gradients([part.dx[i] for part in one.parts], axes[i])
            for i in whole.dx
        }
        dy = {
            (m, i): d
            for m, call in enumerate(one.calls)
            for i, d in call.dy.items()
        }
        found, expected = compared_dx(dx, whole.dx, dy)
        dw = without_tiny(
            [
                (summed([part.dw[key] for part in one.parts]), own)
                for key, own in whole.dw.items()
            ]
        )
        if found or dw:
            difference = of_gradients(
                [*found, *(a for a, _ in dw)], [*expected, *(b for _, b in dw)]
            )
            self._note(one, "gradients", difference)

    def _note(
        self,
        one: _Layer,
        what: str,
        difference: float,
        is_documented: bool = False,
    ) -> None:
        self._tally.note(
            "rows", one.place.name, what, difference, one.limit, is_documented
        )

    def _take_assigned(
        self, place: LayerPlace, whole: Replay, is_comparable: bool
    ) -> None:
        """Takes new values of variables; seeds go their own way."""
        seeds = {id(v) for v in place.cell.seeds}
        known: set[int] = set()
        if len(place.normalizations) == 1 and not place.draws:
            (layer,) = place.normalizations
            known = {id(layer.moving_mean), id(layer.moving_variance)}
        for key, value in whole.assigned.items():
            if key in seeds:
                continue
            if is_comparable or key in known:
                self.assigned[key] = value
            else:
                self.unknown.add(key)
