"""Measures the layers of a model, one after the other, on one device.

Each layer's tasks run as a pipeline runs them, see `lone_layer.py`, on what
the layer before has made of real data. Equal layers are measured once. The
device holds one layer at a time: a model that is too large for it can be
measured.

Method: the first call, which traces and compiles, does not count. Then tasks
run for their share of the time, three times at least; what is noted are median
and quartiles, so a stray interruption does not show. What a call takes by
itself is that of a layer which does nothing.

Limits: a layer is measured alone, and without transfers between devices; what
the others would leave of its caches is imitated, see `bytes_between`. What a
loop keeps for its gradient is not seen. Side effects, such as those of
`tf.print`, happen.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.boundary import Boundary, copied
from tfgpipe.cells import LayerCall
from tfgpipe.costs import PlacedCall, bytes_between, layer_key
from tfgpipe.micro_batches import shapes
from tfgpipe.profiles.cell_seconds import MEASURED
from tfgpipe.profiles.lone_layer import (
    GradientNeeds,
    LayerValues,
    LoneLayer,
    start_values,
)
from tfgpipe.profiles.profile import (
    MOST_SPREAD,
    Spread,
    TaskSeconds,
    share_between_quartiles,
)

_MOST_CALLS = 40

# So many times as long as was asked for, at most.
LONGER = 3


class MeasureSetting(NamedTuple):
    """How to measure.

    Attributes:
        device: Where.
        jit_compile: Whether XLA compiles.
        seconds: For how long, all in all.
    """

    device: str
    jit_compile: bool
    seconds: float


class MeasuredLayer(NamedTuple):
    """What was found out about a step, or steps that are equal.

    Attributes:
        key: The text that they share.
        weights: Variables of the layer of the first.
        timed: Their tasks, by the number of rows.
        measured: What these take.
    """

    key: str
    weights: list[keras.Variable]
    timed: dict[int, LoneLayer]
    measured: tuple[TaskSeconds, ...]


class Measuring:
    """Goes from layer to layer, with what the last one made of the data.

    Args:
        placed: The steps. Of equal ones, the first is built.
        x: What the first of them takes: a micro-batch, by its number of rows.
        setting: How to measure.

    Attributes:
        call_seconds: What a call takes that computes nothing.
    """

    def __init__(
        self,
        placed: Sequence[PlacedCall],
        x: dict[int, Any],
        setting: MeasureSetting,
    ):
        self._placed = placed
        self._setting = setting
        first = next(iter(x.values()))
        self._structure = tree.map_structure(lambda _: 0, first)
        with tf.device(setting.device):
            self._data = {
                rows: Boundary.of(tree.map_structure(copied, x[rows]))
                for rows in sorted(x)
            }
            between = {rows: bytes_between(placed, rows) for rows in x}
            self._others = {n: tf.zeros([b // 4]) for n, b in between.items()}
        self._known: dict[Any, MeasuredLayer] = {}
        self._has_weights = False
        self._left = 0.98 * setting.seconds
        self.call_seconds = self._nothing(0.02 * setting.seconds)

    def _nothing(self, seconds: float) -> float:
        layer = keras.layers.Identity()
        with tf.device(self._setting.device):
            inputs = Boundary([tf.ones([1, 1])], [None])
        timed = self._timed(
            0, LayerCall(layer), inputs, 0, GradientNeeds(False, False)
        )
        found = _sampled(timed, LayerValues(inputs, [], []), seconds)
        return _spread(found["forward"]).low

    def layer(self, i: int) -> MeasuredLayer:
        """Measures the next layer.

        Raises:
            ValueError: If it cannot be measured.
        """
        layer = self._placed[i].layer
        try:
            found = self._found(i)
            self._hand_on(found)
        except Exception as error:
            received = [shapes(own.tensors) for own in self._data.values()]
            raise ValueError(
                "The tasks of each layer must run by themselves to be "
                f"measured. Received: layer '{layer.name}' "
                f"({type(layer).__name__}), for inputs of shape {received}, "
                f"and this {type(error).__name__}: {error}\nCorrect the "
                "layer; pass smaller `micro_batch_sizes` if memory is short; "
                "or give costs by hand, as pairs (layer, cost)."
            ) from error
        self._has_weights |= any(v.trainable for v in found.weights)
        return found

    def loss(self, head: Any, labels: dict[int, Any]) -> MeasuredLayer:
        """Measures the loss, behind the last layer.

        Args:
            head: Computes it.
            labels: What it takes, by the number of rows.
        """
        layer = keras.layers.Identity(name="loss")
        timed = {
            rows: self._timed(
                rows,
                LayerCall(layer),
                data,
                self._structure,
                GradientNeeds(True, True),
                head,
                labels[rows],
            )
            for rows, data in self._data.items()
        }
        values = {
            rows: LayerValues(data, [], [], labels[rows])
            for rows, data in self._data.items()
        }
        return self._measured("loss", [], timed, values, 1)

    def _found(self, i: int) -> MeasuredLayer:
        """What is known of a step like this one; measured, if nothing is."""
        if not self._placed[i].layer.built:  # as the first of its like is
            keys = [own.key for own in self._placed]
            i = keys.index(self._placed[i].key)
        placed = self._placed[i]
        specs = [
            (t.shape, t.dtype)
            for data in self._data.values()
            for t in tree.flatten([data.tensors, data.masks])
            if t is not None
        ]
        gives = repr(getattr(placed.call, "gives", None))
        alike = placed.key, self._has_weights, gives, str(specs)
        if alike in self._known:
            return self._known[alike]
        trains = any(v.trainable for v in placed.layer.variables)
        place = GradientNeeds(trains or self._has_weights, self._has_weights)
        timed = {
            rows: self._timed(rows, placed.call, data, self._structure, place)
            for rows, data in self._data.items()
        }
        key = layer_key(placed.call)
        num_left = len({own.key for own in self._placed[i:]})
        found = self._measured(
            key,
            placed.layer.weights,
            timed,
            self._values(timed),
            num_left,
        )
        if all(own.is_by_itself for own in timed.values()):
            self._known[alike] = found
        return found

    def _timed(self, rows: int, step: LayerCall, *arguments: Any) -> LoneLayer:
        inputs, structure, place, *loss = arguments
        device, jit_compile, _ = self._setting
        read = self._others.get(rows)
        return LoneLayer(
            step, inputs, structure, place, device, jit_compile, read, *loss
        )

    def _values(self, timed: dict[int, LoneLayer]) -> dict[int, LayerValues]:
        """What a step is computed from, by the number of rows."""
        first = next(iter(timed.values()))
        with tf.device(self._setting.device):
            weights = start_values([*first.weights, *first.state])
        half = len(first.weights)
        return {
            rows: LayerValues(self._data[rows], weights[:half], weights[half:])
            for rows in timed
        }

    def _measured(
        self,
        key: str,
        weights: list[keras.Variable],
        timed: dict[int, LoneLayer],
        values: dict[int, LayerValues],
        num_left: int,
    ) -> MeasuredLayer:
        measured = []
        share = self._left / num_left
        for n, (rows, own) in enumerate(timed.items()):
            start = time.perf_counter()
            samples = _sampled(own, values[rows], share / (len(timed) - n))
            taken = time.perf_counter() - start
            share -= taken
            self._left = max(0.0, self._left - taken)
            measured.append(self._tasks(rows, own, samples))
        return MeasuredLayer(key, weights, timed, tuple(measured))

    def _tasks(
        self, rows: int, timed: LoneLayer, samples: dict[str, list[float]]
    ) -> TaskSeconds:
        spreads: dict[str, Any] = {
            kind: _spread(samples[kind]) if kind in samples else None
            for kind in MEASURED
        }
        return TaskSeconds(
            rows,
            timed.output_bytes,
            kept_bytes=0,  # not known without its neighbours
            **spreads,
        )

    def _hand_on(self, found: MeasuredLayer) -> None:
        """Computes what the next layer takes."""
        values = self._values(found.timed)
        for rows, timed in found.timed.items():
            self._data[rows] = timed.outputs(values[rows])
            self._structure = timed.structure


def _sampled(
    timed: LoneLayer, values: LayerValues, seconds: float
) -> dict[str, list[float]]:
    """What tasks take, by kind, measured for some time.

    For up to `LONGER` times as long where measurements do not agree.
    """
    timed.seconds(values)  # traces and compiles
    found: dict[str, list[float]] = collections.defaultdict(list)
    start = time.perf_counter()
    for _ in range(_MOST_CALLS):
        for kind, own in timed.seconds(values).items():
            found[kind] += own
        taken = time.perf_counter() - start
        agree = share_between_quartiles(map(_spread, found.values()))
        if taken >= seconds * (1 if agree <= MOST_SPREAD else LONGER):
            break
    return found


def _spread(samples: list[float]) -> Spread:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)
