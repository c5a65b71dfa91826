"""Each layer beside the host, and its micro-batches beside the whole.

    device     x --> layer --> y --> next layer     as it was rehearsed
               |               |
    host       x --> layer --> y'                    y' beside y

With the gradients that came back on the device, the host has its own:

    device    dx <-- layer <-- dy <-- next layer
    host      dx' <- layer <-- dy                    dx' beside dx

The host runs the same part of the model's graph, cut into functions for it.
Given the very inputs, values of variables and gradients that the layer got on
its device, a difference is that layer's own: nothing of it propagates.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import Cell, CellTasks, KeptValues, Tracer
from tfgpipe.exactness.report import (
    Tally,
    are_finite,
    as_array,
    compared_dx,
    limit_of,
    of_gradients,
    of_outputs,
    without_tiny,
)
from tfgpipe.graphs import (
    TracedModel,
    as_tensor,
    by_reference,
    is_continuous,
    tensors,
)
from tfgpipe.model import ByLayers, LayerPlace, LayerRun, Rehearsal

HOST = "CPU:0"

# Values by the references of tensors of the model's graph.
Values = dict[Any, Any]


class Layer:
    """A layer, what it did on its device, and the same on the host.

    Attributes:
        place: The layer, and where in the pipeline it is.
        name: The same in words.
        taken: By micro-batch, what came in on its device, forward and backward.
        given: By micro-batch, what went out.
        draws: Whether it draws random numbers.
        moments: Of each call of a batch normalisation whose statistics move at
            the end: that, its mean and variance, and the rules.
    """

    def __init__(
        self,
        place: LayerPlace,
        runs: Sequence[LayerRun],
        on_host: CellTasks,
        seeds: set[Any],
    ):
        self.place, self.name = place, place.name
        self.part = part = place.part
        self._on_host = on_host
        self.taken = [by_reference(place.taken, run.taken) for run in runs]
        self.given = [by_reference(place.given, run.given) for run in runs]
        self.draws = any(t.ref() in seeds for t in part.takes)
        traced = part.traced
        self.moments = [
            (layer, call[:2], rules)
            for layer, calls, own_rules in zip(
                traced.normalizations, traced.moments, traced.rules
            )
            for call, rules in zip(calls, own_rules)
            if call[0].op.name in part.forward
        ]
        layer = place.section.layer
        found = [] if layer is None else internals.flat_layers(layer)
        self._dtypes = {one.compute_dtype for one in found} - {None}

    def limit(self, on_host: bool = False) -> float:
        """From where on its numbers differ by more than rounding.

        `on_host` if none of them was computed on a device.
        """
        made = filter(is_continuous, self.place.outputs)
        dtypes = self._dtypes | {t.dtype.name for t in made}
        if on_host:
            return limit_of(dtypes)
        devices = self.place.cell.devices
        return max(limit_of(dtypes, device) for device in devices)

    def forward(self, taken: Values, fixed: Values | None = None) -> Values:
        """Runs it on the host; returns what it gives.

        What is `fixed` of its tensors has these values.
        """
        own = self._on_host
        with tf.device(HOST), self.place.naming():
            values, weights = _copied(taken), self._weights()
            if not fixed:
                given: Values
                given, _ = own.forward(values, weights, keeps=False)()
                return given
            # What is cut may be that of an equal layer.
            ends = {
                t.ref(): first
                for t, first in zip(self.part.gives, own.graph.part.gives)
            }
            ways = [ends[ref] for ref in fixed]
            wanted = [t for t in self.part.gives if t.ref() not in fixed]
            function: Any = own.graph.function(
                ("fixed", *(t.ref() for t in ways)),
                ways,
                [ends[t.ref()] for t in wanted],
            )
            known = own.values(values, weights)
            known.update(by_reference(ways, [*fixed.values()]))
            return by_reference(wanted, function(known))

    def backward(self, taken: Values) -> tuple[Values, dict[int, tf.Tensor]]:
        """Runs its backward pass on the host.

        Returns what that gives, and dense gradients by the ids of weights.
        """
        if not (self.part.gives_back or tensors(self.part.dw)):
            return {}, {}
        own = self._on_host
        with tf.device(HOST), self.place.naming():
            work = own.backward(
                _copied(taken), self._weights(), KeptValues([]), None, 0
            )
            given, sums = work()
            dw = {
                id(v): as_tensor(d.in_dtype(v.dtype).finished())
                for v, d in zip(self.place.weights, own.unpack_sums(sums))
            }
        return given, {key: d for key, d in dw.items() if d is not None}

    def _weights(self) -> Any:
        """The values of its weights, as tasks on the host take them."""
        own = self._on_host
        pairs = zip(self.place.weights, own.weight_dtypes)
        return own.pack_weights(
            [tf.cast(tf.identity(v.value), dtype) for v, dtype in pairs]
        )


def _copied(values: Values) -> Values:
    """The values on the current device."""
    return {ref: tf.identity(value) for ref, value in values.items()}


class Recorded:
    """What a step by layers has come to.

    Attributes:
        layers: The layers in order.
        head: The loss and the metrics of a micro-batch.
        batch: The mini-batch, as it was traced.
        traced: The model's graph.
        total: The loss of the mini-batch.
        gradients: By each trainable weight, or None.
        loss: Where the backward pass starts.
        shares: The share of the rows that each micro-batch has.
    """

    def __init__(self, step: ByLayers, rehearsal: Rehearsal):
        self.batch = batch = step.batch
        self.total, self.gradients, self.loss, calls = rehearsal
        self.traced: TracedModel = batch.traced
        traced, seeds = self.traced, _seed_values(self.traced)
        cells = [
            Cell(i, [], [f"/device:{HOST}"]) for i in range(len(batch.cells))
        ]
        repeated: list[list[bool]] = [[] for _ in traced.uses]
        made = step.places[0].part.made
        tasks = Tracer(False).tasks(made, cells, repeated)
        *self.layers, self.head = [
            Layer(place, runs, tasks[k], seeds)
            for place, runs, k in zip(step.places, calls, traced.cells)
            if place.part.forward or place is step.places[-1]
        ]
        micro_batches = batch.micro_batches
        self.shares = [
            micro_batches.size(m) / micro_batches.num_rows
            for m in range(micro_batches.count)
        ]


def _seed_values(traced: TracedModel) -> set[Any]:
    """The references of all that a seed comes to: it, plus constants."""
    seeds = [t for v, t in traced.state if id(v) in traced.draws]
    found = {t.ref() for t in seeds}
    alike = {(t.dtype, tuple(t.shape)) for t in seeds}
    for op in traced.operations if seeds else ():
        if any(t.ref() in found for t in op.inputs):
            found |= {
                t.ref()
                for t in op.outputs
                if (t.dtype, tuple(t.shape or ())) in alike
            }
    return found


class OnHost:
    """Runs the layers on the host, and compares them, one after the other.

    Attributes:
        dw: Gradients of weights, summed over micro-batches and uses, by id.
        assigned: What Keras makes of variables in the whole mini-batch, by id.
        unknown: ids of those of which that cannot be said.
    """

    def __init__(self, tally: Tally, recorded: Recorded, rounding: float):
        self._tally = tally
        self._recorded = recorded
        self._rounding = rounding  # of sums of gradients
        self._count = len(recorded.shares)
        self._makers: dict[Any, Layer] = {}
        self._losses = _own_losses(recorded)
        traced, made = recorded.traced, recorded.head.part.made
        # Along which axes the rows are of what crosses; what has none, made of
        # all rows at once.
        given = tensors([traced.x, traced.labels, made.dy])
        self._axes: dict[Any, int] = {t.ref(): 0 for t in given}
        self._whole: Values = {}
        self.dw: dict[int, tf.Tensor] = {}
        self.assigned: dict[int, tf.Tensor] = {}
        self.unknown: set[int] = set()

    # ---------------------------------------------------------------- forward
    def forward(self, is_finite: bool) -> None:
        """Compares layer after layer, from the first to the last.

        Unless loss and gradients are finite, the layers are named that make the
        first values that are not.
        """
        #     devices   x0 -> [0] -> x1 -> [1] -> x2
        #     host      x0 -> [0] -> ?  ;  x1 -> [1] -> ?
        #
        # The host begins each layer with what came in on the device, so that a
        # difference is this layer's own.
        for layer in self._recorded.layers:
            self._compare_transfer(layer, layer.part.takes, "what is handed on")
            parts = [layer.forward(taken) for taken in layer.taken]
            if not is_finite:
                self._look_for_nonfinite(layer)
            difference = max(
                of_outputs(*_pairs(given, part, part))
                for given, part in zip(layer.given, parts)
            )
            self._tally.note(
                "forward", layer.name, "outputs", difference, layer.limit()
            )
            self._compare_rows(layer, parts)
            self._makers.update((t.ref(), layer) for t in layer.part.gives)
        if self._count > 1:  # for the axes of gradients
            head = self._recorded.head
            parts = [head.forward(taken) for taken in head.taken]
            self._learn(parts, head.forward(self._all_rows(head)))

    def _look_for_nonfinite(self, layer: Layer) -> None:
        made = [
            own[t.ref()] for own in layer.given for t in layer.place.outputs
        ]
        taken = [own[t.ref()] for own in layer.taken for t in layer.part.takes]
        if are_finite(taken) and not are_finite(made):
            what = "outputs that are not finite, of inputs that are"
            self._tally.note("forward", layer.name, what, math.inf)

    def _compare_transfer(
        self, layer: Layer, taken: Iterable[Any], what: str
    ) -> None:
        """What a layer hands on is what others get, to the bit."""
        by_maker: dict[int, tuple[Layer, list[Any]]] = {}
        for tensor in taken:
            maker = self._makers.get(tensor.ref())
            if maker is not None:
                _, own = by_maker.setdefault(id(maker), (maker, []))
                own.append(tensor.ref())
        order = self._recorded.layers.index
        for maker, refs in by_maker.values():
            first, second = sorted((maker, layer), key=order)
            difference = max(
                of_outputs(*_pairs(got, sent, refs))
                for got, sent in zip(layer.taken, maker.given)
            )
            where = f"{first.name} to {second.name}"
            self._tally.note("transfer", where, what, difference)

    # ------------------------------------------------------------- all rows
    def _all_rows(self, layer: Layer, backward: bool = False) -> Values:
        """What a layer takes of all rows at once."""
        made = layer.part.made
        back = made.backward if backward else ()
        found = {}
        for ref in layer.taken[0] if backward else map(_ref, layer.part.takes):
            parts = [taken[ref] for taken in layer.taken]
            tensor = ref.deref()
            axis = self._axes.get(ref)
            if axis is not None:
                found[ref] = _joined(parts, axis)
            elif tensor.op.name in back and is_continuous(tensor):
                found[ref] = summed(parts)
            else:
                found[ref] = self._whole.get(ref, parts[0])
        return found

    def _learn(self, parts: Sequence[Values], whole: Values) -> None:
        """Notes how rows lie in what was made."""
        for ref, value in whole.items():
            axis = _axis([part[ref] for part in parts], value)
            if axis is None:
                self._whole[ref] = value
            else:
                self._axes[ref] = axis

    def _join(self, parts: Sequence[Values], ref: Any) -> Any:
        """The rows of all parts; without rows, those of the first."""
        axis = self._axes.get(ref)
        own = [part[ref] for part in parts]
        return own[0] if axis is None else _joined(own, axis)

    def _compare_rows(self, layer: Layer, parts: list[Values]) -> None:
        """Compares what micro-batches came to with the whole mini-batch."""
        if self._count == 1:
            self._take_assigned(layer, parts[0], is_comparable=True)
            return
        taken = self._all_rows(layer)
        whole = layer.forward(taken)
        self._learn(parts, whole)
        reasons = _reasons(layer)
        self._compare_outputs(layer, parts, whole, " and ".join(reasons))
        if reasons:
            self._compare_first(layer, taken, whole)
        self._take_assigned(layer, whole, is_comparable=not reasons)

    def _compare_outputs(
        self, layer: Layer, parts: list[Values], whole: Values, reasons: str
    ) -> None:
        # M x (rows / M, ...) -> (rows, ...), beside all rows at once.
        losses = [
            t.ref() for t in layer.place.outputs if t.ref() in self._losses
        ]
        made = [
            t.ref()
            for t in layer.place.outputs
            if t.ref() not in self._losses
            and not self._are_counts(t.ref(), parts, whole)
        ]
        found = {ref: self._join(parts, ref) for ref in made}
        what = "outputs"
        difference = of_outputs(*_pairs(found, whole, made))
        what = f"{what}, by {reasons}" if reasons else what
        limit, is_documented = layer.limit(on_host=True), bool(reasons)
        self._tally.note(
            "rows", layer.name, what, difference, limit, is_documented
        )
        if losses:
            means = {
                ref: sum(
                    share * tf.cast(part[ref], "float64")
                    for share, part in zip(self._recorded.shares, parts)
                )
                for ref in losses
            }
            difference = of_outputs(*_pairs(means, whole, losses))
            what = "what it adds to the loss"
            self._tally.note(
                "rows", layer.name, what, difference, limit, is_documented
            )

    def _are_counts(
        self, ref: Any, parts: Sequence[Values], whole: Values
    ) -> bool:
        """Whether integers are numbers of rows, which add up, or shapes."""
        if ref in self._axes or not ref.deref().dtype.is_integer:
            return False
        own, expected = [as_array(p[ref]) for p in parts], as_array(whole[ref])
        if any(one.shape != expected.shape for one in own):
            return False
        return bool(((expected == sum(own)) | (expected == own[0])).all())

    def _compare_first(
        self, layer: Layer, taken: Values, whole: Values
    ) -> None:
        """The first micro-batch, when the rows of others change."""
        changed = dict(taken)
        for ref in taken.keys() & self._axes.keys():
            axis = self._axes[ref]
            with tf.device(HOST):
                rows = tf.range(taken[ref].shape[axis])
                part = layer.taken[0][ref]
                indices = rows % part.shape[axis]
                changed[ref] = tf.gather(part, indices, axis=axis)
        fixed = {
            t.ref(): whole[t.ref()]
            for _, call, _ in layer.moments
            for t in call
        }
        again = layer.forward(changed, fixed)
        made = [
            t.ref()
            for t in layer.place.outputs
            if t.ref() in again and t.ref() not in self._losses
        ]

        def first_rows(values: Values) -> list[Any]:
            return [self._first_rows(layer, ref, values[ref]) for ref in made]

        what = "outputs, by the rows of other micro-batches"
        difference = of_outputs(first_rows(again), first_rows(whole))
        self._tally.note(
            "rows", layer.name, what, difference, layer.limit(on_host=True)
        )

    def _first_rows(self, layer: Layer, ref: Any, value: Any) -> Any:
        axis = self._axes.get(ref)
        if axis is None:
            return value
        with tf.device(HOST):
            rows = tf.range(layer.given[0][ref].shape[axis])
            return tf.gather(value, rows, axis=axis)

    def _take_assigned(
        self, layer: Layer, whole: Values, is_comparable: bool
    ) -> None:
        """Takes new values of variables; seeds go their own way."""
        traced = self._recorded.traced
        for variable, tensor in traced.new_state:
            key = id(variable)
            if tensor.ref() not in whole or key in traced.draws:
                continue
            if is_comparable:
                self.assigned[key] = whole[tensor.ref()]
            else:
                self.unknown.add(key)
        is_known = len(layer.moments) == 1 and not layer.draws
        for normal, call, rules in layer.moments:
            moving = normal.moving_mean, normal.moving_variance
            for variable, moment, (a, b) in zip(moving, call, rules):
                if not is_known:
                    self.unknown.add(id(variable))
                    continue
                new = as_array(whole[moment.ref()])
                old = self.assigned.get(id(variable), variable.value)
                moved = as_array(old) * a + new * b
                dtype = tf.as_dtype(variable.dtype)
                self.assigned[id(variable)] = tf.cast(moved, dtype)

    # --------------------------------------------------------------- backward
    def backward(self) -> None:
        """Compares the backward pass, from the last layer to the first."""
        if self._count > 1:
            head = self._recorded.head
            parts = [head.backward(taken)[0] for taken in head.taken]
            whole, _ = head.backward(self._all_rows(head, backward=True))
            self._learn(parts, whole)
        for layer in reversed(self._recorded.layers):
            what = "the gradient on its way back"
            self._compare_transfer(layer, layer.part.takes_back, what)
            self._makers.update((t.ref(), layer) for t in layer.part.gives_back)
            runs = [layer.backward(taken) for taken in layer.taken]
            parts, dw = [dx for dx, _ in runs], [own for _, own in runs]
            self._compare_dx(layer, parts)
            own_dw = {key: summed([d[key] for d in dw]) for key in dw[0]}
            if self._count > 1:
                self._compare_gradients(layer, parts, own_dw)
            for key, d in own_dw.items():
                self.dw[key] = self.dw[key] + d if key in self.dw else d

    def _compare_dx(self, layer: Layer, parts: list[Values]) -> None:
        dx = [t.ref() for t in layer.part.gives_back if is_continuous(t)]
        if not dx:
            return
        difference = max(
            of_gradients(
                *compared_dx(
                    {ref: given[ref] for ref in dx},
                    {ref: part[ref] for ref in dx},
                    _dy(layer, taken),
                )
            )
            for taken, given, part in zip(layer.taken, layer.given, parts)
        )
        what = "gradient with respect to inputs"
        self._tally.note(
            "gradient", layer.name, what, difference, layer.limit()
        )

    def _compare_gradients(
        self, layer: Layer, parts: list[Values], dw: Mapping[int, Any]
    ) -> None:
        """Compares gradients of micro-batches with the whole mini-batch's."""
        whole, whole_dw = layer.backward(self._all_rows(layer, backward=True))
        self._learn(parts, whole)
        if _reasons(layer):
            return
        wanted = [t.ref() for t in layer.part.gives_back if is_continuous(t)]
        found = {
            ref: self._join(parts, ref)
            if ref in self._axes
            else summed([part[ref] for part in parts])
            for ref in wanted
        }
        dy = {
            (m, ref): d
            for m, taken in enumerate(layer.taken)
            for ref, d in _dy(layer, taken).items()
        }
        expected = {ref: whole[ref] for ref in wanted}
        found_dx, expected_dx = compared_dx(found, expected, dy)
        limit = layer.limit(on_host=True)
        pairs = without_tiny([(dw[key], own) for key, own in whole_dw.items()])
        if pairs:
            limit = max(limit, self._rounding)
        if found_dx or pairs:
            difference = of_gradients(
                [*found_dx, *(a for a, _ in pairs)],
                [*expected_dx, *(b for _, b in pairs)],
            )
            self._tally.note("rows", layer.name, "gradients", difference, limit)


def _reasons(layer: Layer) -> list[str]:
    """What its micro-batches do otherwise on purpose, as the guide says."""
    return [
        *(["the moments of each micro-batch"] if layer.moments else []),
        *(["random numbers for each micro-batch"] if layer.draws else []),
    ]


def _own_losses(recorded: Recorded) -> set[Any]:
    """The references of what layers give to be added to the loss."""
    traced, head = recorded.traced, recorded.head.part
    found = set()
    for loss in traced.losses[traced.num_head_losses :]:
        while loss.op.name in head.forward and loss.op.inputs:
            loss = loss.op.inputs[0]  # a sum, or a cast
        found.add(loss.ref())
    return found


def _dy(layer: Layer, taken: Values) -> Values:
    """The gradients that came back to a layer."""
    back = [t for t in layer.part.takes_back if is_continuous(t)]
    return {t.ref(): taken[t.ref()] for t in back}


def _ref(tensor: Any) -> Any:
    return tensor.ref()


def _pairs(
    one: Values, other: Values, refs: Iterable[Any]
) -> tuple[list[Any], list[Any]]:
    """What two have of the same tensors, lists of TensorFlow's left out."""
    keys = [ref for ref in refs if ref.deref().dtype != tf.variant]
    return [one[ref] for ref in keys], [other[ref] for ref in keys]


def _axis(parts: Sequence[Any], whole: Any) -> int | None:
    """Along which axis parts make a whole.

    None if a tensor is the same in all parts and in the whole, such as
    positions, or a number.
    """
    shapes = [tuple(t.shape) for t in parts]
    if any(len(shape) != len(whole.shape) for shape in shapes):
        return None
    for axis, size in enumerate(whole.shape):
        sizes = [shape[axis] for shape in shapes]
        if size == sum(sizes) != sizes[0]:
            return axis
    return None


def _joined(parts: Sequence[Any], axis: int) -> tf.Tensor:
    with tf.device(HOST):
        return tf.concat(parts, axis)


def summed(gradients: Sequence[Any]) -> Any:
    """The sum of those that are not None, or None."""
    known = [d for d in gradients if d is not None]
    with tf.device(HOST):
        return tf.add_n(known) if known else None
