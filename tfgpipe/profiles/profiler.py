"""`profile`: what the layers of a model take, measured on one device.

Each layer's tasks run as a pipeline runs them, see `lone_layer.py`, one layer
after the other, on what the layer before has made of real data. Equal layers
are measured once. The device holds one layer at a time: a model that is too
large for it can be measured.

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
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.boundary import Boundary, copied, structure_of
from tfgpipe.cells import LayerCall
from tfgpipe.checks import as_count, as_integer, checked_bool, checked_positive
from tfgpipe.costs import (
    PlacedCall,
    bytes_between,
    layer_key,
    slot_bytes_of,
    weight_sizes,
    with_weights,
)
from tfgpipe.devices import names
from tfgpipe.loss import Head, streams_loss
from tfgpipe.micro_batches import as_specs, check_rows, first_tensor, shapes
from tfgpipe.profiles.lone_layer import (
    GradientNeeds,
    LayerValues,
    LoneLayer,
    start_values,
)
from tfgpipe.profiles.profile import (
    MEASURED,
    MOST_SPREAD,
    LayerProfile,
    Profile,
    Spread,
    TaskSeconds,
    share_between_quartiles,
)
from tfgpipe.sequence import inputs as inputs_lib
from tfgpipe.sequence import source_of


def profile(
    layers: Any,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    micro_batch_sizes: Sequence[int] | None = None,
    device: Any = None,
    seconds: float = 30.0,
    jit_compile: bool = False,
    optimizer: Any = "adam",
    verbose: str | int = "auto",
) -> Profile:
    """Measures what each layer of a model takes on one device.

    The layers' tasks run there as in a pipeline, one layer after the other, so
    that the device holds no more than one of them; equal layers are measured
    once. Nothing is trained: variables, states and random seeds stay as they
    are. Layers that were not built are built, without storage for their
    variables, which a `GPipe` gives them; plain Keras cannot train these.

    Args:
        layers: As for `GPipe`: a list of layers, or a model.
        x: The inputs of a micro-batch, or more.
        y: Its labels, to measure the loss as well; or None.
        loss: The loss, as for `compile`. Defaults to that of a compiled model.
        micro_batch_sizes: Rows of the micro-batches to measure, the first ones
            of `x`. Defaults to all rows, a quarter and a sixteenth of them;
            others are on a line, but that smaller ones are taken to be no
            faster. Plan for no more rows than were measured.
        device: A name, or a `tf.config.LogicalDevice`. Defaults to the first
            accelerator.
        seconds: For how long to measure, all in all, without what is traced
            and compiled; three times as long where measurements do not agree.
            Every task runs three times at least.
        jit_compile: Whether XLA compiles the tasks, as `compile` can ask for.
            On a TPU, it always does.
        optimizer: Whose slots are counted; None for none.
        verbose: 1 for a progress bar, 2 for a line a layer, 0 for silence.

    Returns:
        The record; `print` shows a table of it.

    Raises:
        ValueError: If an argument is wrong, or a layer cannot be measured. It
            is named then.
    """
    seconds = checked_positive("seconds", seconds, "for how long to measure")
    checked_bool("jit_compile", jit_compile)
    verbose = _checked_verbose(verbose)
    num_slot_bytes = slot_bytes_of(optimizer)
    source = source_of(layers)
    if source.problems:
        raise ValueError("\n".join(source.problems))
    name = _device(device)
    data = inputs_lib.as_tensors(x, y)
    check_rows(*data, None)
    sizes = _sizes(micro_batch_sizes, first_tensor(data[0]).shape[0])
    setting = MeasureSetting(
        name, jit_compile or names.only_compiles([name]), seconds
    )
    with (
        internals.outside_functions(),
        internals.without_strategy(),
        internals.random_state_kept(),
    ):
        x, spec = _as_taken(source, data[0])
        placed, output = source.placed_steps(spec)
        head = _head(layers, loss, x, data[1], output)
        own = Measuring(placed, _rows(x, sizes), setting)
        found = [own.layer(i) for i in _progress(placed, verbose)]
        of_loss = None
        if head is not None:
            of_loss = own.loss(head, _rows((data[1], None), sizes))
        records = layer_profiles(placed, found, of_loss, num_slot_bytes)
    made = Profile(
        layers=tuple(records[0]),
        loss=records[1],
        device=name,
        call_seconds=own.call_seconds,
        jit_compile=setting.jit_compile,
        optimizer=_class_name(optimizer),
        versions=_versions(),
    )
    made.warn_if_spread()
    return made


def _checked_verbose(verbose: Any) -> int:
    """As Keras takes it: a boolean is one of the numbers."""
    if isinstance(verbose, str) and verbose == "auto":
        return 1
    found = int(verbose) if isinstance(verbose, bool) else as_integer(verbose)
    if found not in (0, 1, 2):
        raise ValueError(
            '`verbose` must be "auto", 0, 1 or 2. '
            f"Received: verbose={verbose!r}."
        )
    return found


def _device(device: Any) -> str:
    """The full name of a device; that of the first accelerator by default."""
    if device is None:
        return names.accelerators()[0]
    name = names.resolve_device(getattr(device, "name", device))
    if name is None:
        raise ValueError(
            "`device` must be the name of one that TensorFlow lists, one of "
            f"{names.all_devices()}. Received: device={device!r}."
        )
    return name


def _sizes(sizes: Any, num_rows: int) -> list[int]:
    """The micro-batch sizes to measure."""
    if sizes is None:
        return sorted({max(1, num_rows // part) for part in (16, 4, 1)})
    is_list = isinstance(sizes, Iterable) and not isinstance(sizes, str)
    listed = [*sizes] if is_list else []
    counts = [as_count(n) for n in listed]
    if not counts or any(n is None or n > num_rows for n in counts):
        raise ValueError(
            "`micro_batch_sizes` must be a list of integers from 1 to the "
            f"rows of `x`, {num_rows}. Received: micro_batch_sizes={sizes!r}. "
            "Pass a larger `x`, or smaller sizes."
        )
    return sorted({n for n in counts if n is not None})


def _rows(nest: Any, sizes: Sequence[int]) -> dict[int, Any]:
    """The first rows of a nest, by their number."""
    return {
        rows: tree.map_structure(
            lambda t, rows=rows: None if t is None else t[:rows], nest
        )
        for rows in sizes
    }


def _as_taken(source: Any, x: Any) -> tuple[Any, Any]:
    """Data as the first step takes it, and what the layers are built for."""
    x = source.arranged(x)
    spec = source.input_spec
    is_declared = spec is not None
    if not is_declared:
        spec = inputs_lib.data_spec(x, source.layers[0].compute_dtype)
    taken = inputs_lib.as_expected(x, spec, is_declared)
    for own, given in zip(tree.flatten(spec), tree.flatten(taken)):
        if own is None or given is None:
            continue
        expected, found = (tf.TensorShape(t.shape)[1:] for t in (own, given))
        if not expected.is_compatible_with(found):
            raise ValueError(
                "`x` must have the shapes of the model's inputs. Expected: "
                f"rows of shape {expected}. Received: rows of shape {found}."
            )
    return taken, spec


def _head(layers: Any, loss: Any, x: Any, y: Any, output: Any) -> Head | None:
    """What computes the loss, or None where there are no labels."""
    if y is not None and loss is None and isinstance(layers, keras.Model):
        loss = getattr(layers, "loss", None)
    if y is None and loss is None:
        return None
    if y is None or loss is None:
        raise ValueError(
            "`y` and `loss` must be given together: a loss needs labels. "
            f"Received: y={'None' if y is None else 'given'}, loss={loss!r}. "
            "Pass both, or none to leave the loss unmeasured."
        )
    holder = keras.Model()
    specs = as_specs(y), output, None
    try:
        holder.compile(loss=loss)
        internals.build_losses_and_metrics(holder, as_specs(x), *specs)
    except Exception as error:  # of many kinds
        raise ValueError(
            "`loss` must be one that `compile` takes, and `y` labels that fit "
            f"it and what the last layer returns. Received: loss={loss!r}, y="
            f"{_shapes(y)}, for outputs {_shapes(output)}, and this "
            f"{type(error).__name__}: {error}"
        ) from error
    if not streams_loss(holder, *specs):
        raise ValueError(
            "`loss` must add up over rows to be measured by micro-batches: "
            "other losses are computed of the whole mini-batch, by no cell. "
            f"Received: loss={loss!r}. Leave out `y` and `loss`."
        )
    return Head(holder, True, False)


def _shapes(nest: Any) -> Any:
    return tree.map_structure(lambda t: t if t is None else t.shape, nest)


def _progress(placed: Sequence[Any], verbose: int) -> Iterator[int]:
    """Goes through the steps, and shows how far it is."""
    bar = keras.utils.Progbar(
        len(placed),
        verbose=verbose,
        unit_name="layer",
    )
    for i in range(len(placed)):
        yield i
        bar.update(i + 1)


def _class_name(optimizer: Any) -> str:
    if optimizer is None:
        return "none"
    return type(keras.optimizers.get(optimizer)).__name__


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
    }


def layer_profiles(
    placed: Sequence[PlacedCall],
    found: Sequence[MeasuredLayer],
    loss: MeasuredLayer | None,
    num_slot_bytes: Callable[[Any], int],
) -> tuple[list[LayerProfile], LayerProfile | None]:
    """The records of layers, and that of the loss.

    Args:
        placed: The steps.
        found: What was found out about each.
        loss: About the loss, or None.
        num_slot_bytes: What the optimizer keeps for a variable, in bytes.
    """
    row = [*found] if loss is None else [*found, loss]
    kept = {
        rows: kept_in_row([own.timed[rows].kept for own in row])
        for rows in row[0].timed
    }
    named = [(step.layer.name, own) for step, _, own in with_weights(placed)]
    layers = [
        LayerProfile(
            name=name,
            key=own.key,
            **weight_sizes(weights, num_slot_bytes),
            measured=tuple(
                TaskSeconds(
                    rows,
                    timed.output_bytes,
                    int(kept[rows][i]),
                    **own.seconds[rows],
                )
                for rows, timed in own.timed.items()
            ),
        )
        for i, (own, (name, weights)) in enumerate(
            zip(row, [*named, ("loss", [])])
        )
    ]
    return layers[: len(found)], layers[-1] if loss is not None else None


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


# ------------------------------------------------------- from layer to layer
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
        seconds: What these take, by the number of rows and kind.
    """

    key: str
    weights: list[keras.Variable]
    timed: dict[int, LoneLayer]
    seconds: dict[int, dict[str, Any]]


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
        self._structure = structure_of(first)
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
        seconds = {}
        share = self._left / num_left
        for n, (rows, own) in enumerate(timed.items()):
            start = time.perf_counter()
            samples = _sampled(own, values[rows], share / (len(timed) - n))
            taken = time.perf_counter() - start
            share -= taken
            self._left = max(0.0, self._left - taken)
            seconds[rows] = {
                kind: _spread(samples[kind]) if kind in samples else None
                for kind in MEASURED
            }
        return MeasuredLayer(key, weights, timed, seconds)

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
