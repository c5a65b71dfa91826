"""Each layer on its device, beside the same on the host.

    device     x --> layer --> y --> next layer     as it was rehearsed
               |               |
    host       x --> layer --> y'                    y' beside y

With the gradients that came back on the device, the host has its own:

    device    dx <-- layer <-- dy <-- next layer
    host      dx' <- layer <-- dy                    dx' beside dx

The host runs the same part of the model's graph, cut into functions for it.
Given the very inputs, values of variables and gradients that the layer got on
its device, a difference is that layer's own: nothing of it propagates.

The variables that layers assign follow from what the host has made of the
micro-batches, by the rules of `state/rules.py`; the trial says whether these
come to what the whole mini-batch would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
)
from tfgpipe.graphs import (
    Indices,
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
            the end: that, its mean, variance and count, and the rules.
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
            (layer, call[:3], rules)
            for layer, calls, own_rules in zip(
                traced.normalizations, traced.moments, traced.rules
            )
            for call, rules in zip(calls, own_rules)
            if call[0].op.name in part.forward
        ]
        layer = place.section.layer
        found = [] if layer is None else internals.flat_layers(layer)
        self._dtypes = {one.compute_dtype for one in found} - {None}

    def limit(self) -> float:
        """From where on its numbers differ by more than rounding."""
        made = filter(is_continuous, self.place.outputs)
        dtypes = self._dtypes | {t.dtype.name for t in made}
        devices = self.place.cell.devices
        return max(limit_of(dtypes, device) for device in devices)

    @property
    def by_design(self) -> str:
        """What micro-batches do otherwise on purpose, as the guide says."""
        reasons = [
            *(["the moments of each micro-batch"] if self.moments else []),
            *(["random numbers for each micro-batch"] if self.draws else []),
        ]
        return " and ".join(reasons)

    def forward(self, taken: Values) -> Values:
        """Runs it on the host; returns what it gives."""
        own = self._on_host
        with tf.device(HOST), self.place.naming():
            given: Values
            values, weights = _copied(taken), self._weights()
            given, _ = own.forward(values, weights, keeps=False)()
            return given

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
            dw = [
                as_tensor(d.in_dtype(use.variable.dtype).finished())
                for use, d in zip(self.part.uses, own.unpack_sums(sums))
            ]
            found = {
                id(use.variable): d
                if use.piece is None
                else use.piece.in_whole(d, use.variable.shape)
                for use, d in zip(self.part.uses, dw)
                if d is not None
            }
        return given, found

    def _weights(self) -> Any:
        """The values of its weights, as tasks on the host take them."""
        own = self._on_host
        pairs = zip(self.part.uses, own.weight_dtypes)
        return own.pack_weights(
            [
                tf.cast(use.of(tf.identity(use.variable.value)), dtype)
                for use, dtype in pairs
            ]
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
        indices: list[list[Indices]] = [[] for _ in traced.uses]
        made = step.places[0].part.made
        tasks = Tracer(False).tasks(made, cells, indices)
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
        assigned: What becomes of variables that layers assign, by id.
        unknown: ids of those of which that cannot be said.
    """

    def __init__(self, tally: Tally, recorded: Recorded):
        self._tally = tally
        self._recorded = recorded
        self._makers: dict[Any, Layer] = {}
        self._metrics = {id(v) for v in recorded.batch.call.metric_state}
        self._trained = {id(u.variable) for u in recorded.traced.trained_uses}
        self.dw: dict[int, tf.Tensor] = {}
        self.assigned: dict[int, Any] = {}
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
            self._take_assigned(layer, parts)
            self._makers.update((t.ref(), layer) for t in layer.part.gives)

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

    # ------------------------------------------------------------------ state
    def _take_assigned(self, layer: Layer, parts: Sequence[Values]) -> None:
        """Takes new values of variables; seeds go their own way."""
        traced, shares = self._recorded.traced, self._recorded.shares
        for variable, tensor in traced.new_state:
            key = id(variable)
            if tensor.ref() not in parts[0] or key in traced.draws:
                continue
            values = [part[tensor.ref()] for part in parts]
            self.assigned[key] = values[0]
            if key in self._metrics:
                self.assigned[key] = self._run_on(layer, variable, values)
            elif is_continuous(tensor) and key not in self._trained:
                self.assigned[key] = _mean(values, shares)
        for normal, call, rules in layer.moments:
            moving = normal.moving_mean, normal.moving_variance
            moments = _moments(call, parts, shares)
            for variable, moment, (a, b) in zip(moving, moments, rules):
                old = self.assigned.get(id(variable), variable.value)
                self.assigned[id(variable)] = as_array(old) * a + moment * b

    def _run_on(
        self, layer: Layer, variable: Any, values: Sequence[Any]
    ) -> Any:
        """What a metric comes to, which runs on or begins anew with zero.

        That is what all micro-batches have added to it.
        """
        state = self._recorded.traced.state
        starts = [
            taken[t.ref()]
            for taken in layer.taken
            for v, t in state
            if v is variable and t.ref() in taken
        ]
        is_added_up = variable.aggregation == "sum"
        is_one = len(self._recorded.batch.cells[0].devices) == 1
        # Nothing is known of one that begins in another layer.
        if len(starts) != len(values) or not (is_added_up or is_one):
            self.unknown.add(id(variable))
        pairs = zip(values, starts)
        added = sum(as_array(new) - as_array(old) for new, old in pairs)
        return as_array(variable.value) + added

    # --------------------------------------------------------------- backward
    def backward(self) -> None:
        """Compares the backward pass, from the last layer to the first."""
        for layer in reversed(self._recorded.layers):
            what = "the gradient on its way back"
            self._compare_transfer(layer, layer.part.takes_back, what)
            self._makers.update((t.ref(), layer) for t in layer.part.gives_back)
            runs = [layer.backward(taken) for taken in layer.taken]
            dw = [own for _, own in runs]
            self._compare_dx(layer, [dx for dx, _ in runs])
            own_dw = {key: summed([d[key] for d in dw]) for key in dw[0]}
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


def _dy(layer: Layer, taken: Values) -> Values:
    """The gradients that came back to a layer."""
    back = [t for t in layer.part.takes_back if is_continuous(t)]
    return {t.ref(): taken[t.ref()] for t in back}


def _pairs(
    one: Values, other: Values, refs: Iterable[Any]
) -> tuple[list[Any], list[Any]]:
    """What two have of the same tensors, lists of TensorFlow's left out."""
    keys = [ref for ref in refs if ref.deref().dtype != tf.variant]
    return [one[ref] for ref in keys], [other[ref] for ref in keys]


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """A mean, in double precision."""
    return sum(share * as_array(own) for share, own in zip(shares, values))


def _moments(
    call: Sequence[Any], parts: Sequence[Values], shares: Sequence[float]
) -> tuple[Any, Any]:
    """Mean and variance of all rows, from those of micro-batches."""
    means, variances, counts = (
        [0 if t is None else as_array(part[t.ref()]) for part in parts]
        for t in call
    )
    if call[2] is not None:  # of what is not masked
        shares = [float(own / max(sum(counts), 1)) for own in counts]
    mean = _mean(means, shares)
    within = _mean(variances, shares)
    return mean, within + _mean([(m - mean) ** 2 for m in means], shares)


def summed(gradients: Sequence[Any]) -> Any:
    """The sum of those that are not None, or None."""
    known = [d for d in gradients if d is not None]
    with tf.device(HOST):
        return tf.add_n(known) if known else None
