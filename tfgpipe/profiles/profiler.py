"""`profile`: what the layers of a model take, measured on one device.

The model is cut into as many cells as it has layers. Their tasks run as a
pipeline runs them, see `lone_layer.py`, one layer after the other, on what
those before have made of real data. Equal layers are measured once. The device
holds one layer at a time: a model that is too large for it can be measured.

Method: the first call, which traces and compiles, does not count. Then tasks
run for their share of the time, three times at least; what is noted are median
and quartiles, so a stray interruption does not show. What a call takes by
itself is the time of a layer which does nothing.

Limits: a layer is measured alone, and without transfers between devices; what
the others would leave of its caches is imitated, see `bytes_between`. What a
loop keeps for its gradient is not seen. Side effects, such as of
`tf.print`, happen.
"""

from __future__ import annotations

import collections
import platform
import statistics
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe import inputs as inputs_lib
from tfgpipe import internals
from tfgpipe.cells import Head
from tfgpipe.checks import as_count, as_integer, checked_bool, checked_positive
from tfgpipe.costs import (
    Placed,
    bytes_between,
    slot_bytes_of,
    weight_sizes,
    with_weights,
)
from tfgpipe.devices import names
from tfgpipe.inputs import (
    as_specs,
    check_rows,
    first_tensor,
    shapes,
)
from tfgpipe.internals import Nest
from tfgpipe.loss import loss_adds_up
from tfgpipe.profiles.lone_layer import (
    LayersAlone,
    LayerValues,
    LoneLayer,
)
from tfgpipe.profiles.profile_record import (
    MEASURED,
    MOST_SPREAD,
    LayerProfile,
    Profile,
    Spread,
    TaskSeconds,
    share_between_quartiles,
)
from tfgpipe.sequence import Source, source_of


def profile(
    layers: Any,
    x: Nest,
    y: Nest = None,
    *,
    loss: Any = None,
    micro_batch_sizes: Sequence[int] | None = None,
    device: str | tf.config.LogicalDevice | None = None,
    seconds: float = 30.0,
    jit_compile: bool | str = "auto",
    optimizer: str | keras.Optimizer | None = "adam",
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
        loss: The loss, as for `compile`. Defaults to a compiled model's.
        micro_batch_sizes: Rows of the micro-batches to measure, the first ones
            of `x`. Defaults to all rows, a quarter and a sixteenth of them;
            others are on a line, but that smaller ones are taken to be no
            faster. Plan for no more rows than were measured.
        device: A name, or a `tf.config.LogicalDevice`. Defaults to the first
            accelerator.
        seconds: For how long to measure, all in all, without what is traced
            and compiled; three times as long where measurements do not agree.
            Every task runs three times at least.
        jit_compile: Whether XLA compiles the tasks, as in `compile`: True,
            False, or "auto", on accelerators only. On a TPU, it always does.
        optimizer: Whose slots are counted; None for none.
        verbose: 1 for a progress bar, 2 for a line a layer, 0 for silence.

    Returns:
        The record; `print` shows a table of it.

    Raises:
        ValueError: If an argument is wrong, or a layer cannot be measured. It
            is named then.

    Example:

    >>> import numpy as np
    >>> import tfgpipe
    >>> layers = [keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4))]
    >>> record = tfgpipe.profile(
    ...     layers, np.ones((16, 8)), seconds=0.1, verbose=0
    ... )
    >>> plan = tfgpipe.plan(
    ...     layers, 16, devices=["CPU:0"], machine="v100", profile=record
    ... )
    """
    seconds = checked_positive("seconds", seconds, "for how long to measure")
    is_default = isinstance(jit_compile, str) and jit_compile == "auto"
    if not is_default:
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
    compiles = names.has_accelerator([name]) if is_default else jit_compile
    compiles = bool(compiles) or names.only_compiles([name])
    with (
        internals.outside_functions(),
        internals.without_strategy(),
        internals.random_state_kept(),
    ):
        x, spec = _as_taken(source, data[0])
        placed = Placed(source, spec)
        head = _head(layers, loss, x, data[1], placed.output)
        labels = None if head is None else (data[1], None)
        rows = _rows(x, sizes), _rows(labels, sizes)
        measuring = Measuring(placed, *rows, head, name, compiles, seconds)
        bar = keras.utils.Progbar(
            len(placed.layers), verbose=verbose, unit_name="layer"
        )
        records = []
        for k, (layer, weights) in enumerate(with_weights(placed)):
            sizes_of_layer = weight_sizes(weights, num_slot_bytes)
            key, tasks = placed.keys[k], measuring.layer(k)
            records.append(
                LayerProfile(layer.name, key, **sizes_of_layer, measured=tasks)
            )
            bar.update(k + 1)
        of_loss = None
        if head is not None:
            of_loss = LayerProfile(
                "loss",
                "loss",
                **weight_sizes([], num_slot_bytes),
                measured=measuring.layer(len(records)),
            )
    optimizer_name = "none"
    if optimizer is not None:
        optimizer_name = type(keras.optimizers.get(optimizer)).__name__
    record = Profile(
        layers=tuple(records),
        loss=of_loss,
        device=name,
        call_seconds=measuring.call_seconds,
        jit_compile=compiles,
        optimizer=optimizer_name,
        versions={
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    )
    record.warn_if_spread()
    return record


def _checked_verbose(verbose: str | int) -> int:
    """Returns a level of Keras's."""
    if isinstance(verbose, str) and verbose == "auto":
        return 1
    level = int(verbose) if isinstance(verbose, bool) else as_integer(verbose)
    if level not in (0, 1, 2):
        raise ValueError(
            '`verbose` must be "auto", 0, 1 or 2. '
            f"Received: verbose={verbose!r}."
        )
    return level


def _device(device: str | tf.config.LogicalDevice | None) -> str:
    """Returns the full name of a device; the first accelerator's by default."""
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
    """Returns the micro-batch sizes to measure."""
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


def _rows(nest: Nest, sizes: Sequence[int]) -> dict[int, Any]:
    """Returns the first rows of a nest, by their number."""
    return {
        rows: tree.map_structure(
            lambda t, rows=rows: None if t is None else t[:rows], nest
        )
        for rows in sizes
    }


def _as_taken(source: Source, x: Nest) -> tuple[Any, Any]:
    """Data as the first step takes it, and what the layers are built for."""
    x = source.arranged(x)
    spec = source.input_spec
    is_declared = spec is not None
    if not is_declared:
        spec = inputs_lib.data_spec(x, source.layers[0].compute_dtype)
    taken = inputs_lib.as_expected(x, spec, is_declared)
    inputs_lib.check_shapes(taken, spec, is_exact=True)
    return taken, spec


def _head(layers: Any, loss: Any, x: Nest, y: Nest, output: Any) -> Head | None:
    """Returns the head with the loss, or None if there are no labels."""
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
        adds_up = loss_adds_up(holder, *specs)
    except Exception as error:  # of many kinds
        raise ValueError(
            "`loss` must be one that `compile` takes, and `y` labels that fit "
            f"it and what the last layer returns. Received: loss={loss!r}, y="
            f"{_shapes(y)}, for outputs {_shapes(output)}, and this "
            f"{type(error).__name__}: {error}"
        ) from error
    if not adds_up:
        raise ValueError(
            "`loss` must add up over rows to be measured by micro-batches: "
            "other losses are computed of the whole mini-batch, by no cell. "
            f"Received: loss={loss!r}. Leave out `y` and `loss`."
        )
    return Head(holder, True, False)


def _shapes(nest: Nest) -> Any:
    return tree.map_structure(lambda t: t if t is None else t.shape, nest)


# ------------------------------------------------------- from layer to layer
_MOST_CALLS = 40

# So many times as long as was asked for, at most.
LONGER = 3


class Measuring:
    """Goes from layer to layer, with what those before made of the data.

    A micro-batch and its labels are given for each number of rows.

    Attributes:
        call_seconds: What a call takes that computes nothing.
    """

    def __init__(
        self,
        placed: Placed,
        x: dict[int, Any],
        labels: dict[int, Any],
        head: Head | None,
        device: str,
        jit_compile: bool,
        seconds: float,
    ):
        self._placed = placed
        self._device = device
        self._jit_compile = jit_compile
        self._count = len(placed.layers) + (head is not None)
        with tf.device(device):
            data = {
                n: tree.map_structure(
                    lambda t: t if t is None else tf.identity(t), x[n]
                )
                for n in sorted(x)
            }
            between = {rows: bytes_between(placed, rows) for rows in x}
            self._others = {n: tf.zeros([b // 4]) for n, b in between.items()}
        self._models = {
            n: self._model(placed, x_of_rows, head, labels[n])
            for n, x_of_rows in data.items()
        }
        self._values = {
            n: x_of_rows.start for n, x_of_rows in self._models.items()
        }
        self._timed: dict[Hashable, dict[int, LoneLayer]] = {}
        self._seconds: dict[Hashable, dict[int, dict[str, Any]]] = {}
        self._left = 0.98 * seconds
        self.call_seconds = self._nothing(0.02 * seconds)

    def _model(self, placed: Placed, x: Nest, *loss: Any) -> LayersAlone:
        try:
            return LayersAlone(
                placed, x, self._device, self._jit_compile, *loss
            )
        except Exception as error:
            raise _not_measured("a model", shapes(x), error) from error

    def _nothing(self, seconds: float) -> float:
        layers = [keras.Input((1,)), keras.layers.Identity()]
        source = source_of(layers)
        model = self._model(Placed(source, source.input_spec), tf.ones([1, 1]))
        # Behind it, its output is handed out.
        timed = model.alone(1, None)
        samples = _sampled(timed, model.values(1, model.start), seconds)
        return _spread(samples["forward"]).low

    def layer(self, k: int) -> tuple[TaskSeconds, ...]:
        """Measures the next layer; behind the last one, the loss.

        Raises:
            ValueError: If it cannot be measured.
        """
        try:
            return self._layer(k)
        except Exception as error:
            name = "the loss"
            if k < len(self._placed.layers):
                layer = self._placed.layers[k]
                name = f"layer '{layer.name}' ({type(layer).__name__})"
            live = [shapes(model.live[k]) for model in self._models.values()]
            raise _not_measured(name, live, error) from error

    def _layer(self, k: int) -> tuple[TaskSeconds, ...]:
        models = self._models
        alike = self._alike(k)
        values = {
            n: model.values(k, self._values[n]) for n, model in models.items()
        }
        if alike not in self._timed:
            timed = {
                n: model.alone(k, self._others[n])
                for n, model in models.items()
                if not model.is_empty(k)
            }
            self._timed[alike] = timed
            self._seconds[alike] = self._measured(k, values)
        timed = self._timed[alike]
        for n, model in models.items():
            outputs = timed[n].outputs(values[n]) if n in timed else []
            self._values[n] = model.behind(k, self._values[n], outputs)
        return tuple(
            TaskSeconds(
                n,
                models[n].output_bytes(k),
                models[n].kept_bytes[k],
                **self._seconds[alike][n],
            )
            for n in models
        )

    def _alike(self, k: int) -> Hashable:
        """Returns a key that layers share which are measured once."""
        return tuple(model.alike(k) for model in self._models.values())

    def _measured(
        self, k: int, values: dict[int, LayerValues]
    ) -> dict[int, dict[str, Any]]:
        """Measures the tasks of a layer, by the number of rows and kind."""
        by_rows: dict[int, dict[str, Any]] = {}
        timed = self._timed[self._alike(k)]
        share = self._left / len({*map(self._alike, range(k, self._count))})
        for i, rows in enumerate(values):
            samples = {"forward": [self.call_seconds] * 2}
            if rows in timed:
                start = time.perf_counter()
                seconds = share / (len(values) - i)
                samples = _sampled(timed[rows], values[rows], seconds)
                taken = time.perf_counter() - start
                share -= taken
                self._left = max(0.0, self._left - taken)
            by_rows[rows] = {
                kind: _spread(samples[kind]) if kind in samples else None
                for kind in MEASURED
            }
        return by_rows


def _not_measured(name: str, received: object, error: Exception) -> ValueError:
    words = [
        "The tasks of each layer must run by themselves to be measured. "
        f"Received: {name}, for inputs of shape {received}, and this "
        f"{type(error).__name__}: {error}",
        *getattr(error, "__notes__", []),
        "Correct the layer; pass smaller `micro_batch_sizes` if memory is "
        "short; or give costs by hand, as pairs (layer, cost).",
    ]
    return ValueError("\n".join(words))


def _sampled(
    timed: LoneLayer, values: LayerValues, seconds: float
) -> dict[str, list[float]]:
    """Measures tasks for some time, by kind.

    For up to `LONGER` times as long where measurements do not agree.
    """
    timed.seconds(values)  # traces and compiles
    by_kind: dict[str, list[float]] = collections.defaultdict(list)
    start = time.perf_counter()
    for _ in range(_MOST_CALLS):
        for kind, samples in timed.seconds(values).items():
            by_kind[kind] += samples
        taken = time.perf_counter() - start
        agree = share_between_quartiles(map(_spread, by_kind.values()))
        if taken >= seconds * (1 if agree <= MOST_SPREAD else LONGER):
            break
    return by_kind


def _spread(samples: list[float]) -> Spread:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)
