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
    is_auto = isinstance(verbose, str) and verbose == "auto"
    number = int(verbose) if isinstance(verbose, bool) else verbose
    level = 1 if is_auto else as_integer(number)
    if level not in (0, 1, 2):
        raise ValueError(
            '`verbose` must be "auto", 0, 1 or 2. '
            f"Received: verbose={verbose!r}."
        )
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
        measuring = Measuring(
            placed, (x, labels), sizes, head, name, compiles, seconds
        )
        items = [
            (layer.name, key, weights)
            for (layer, weights), key in zip(with_weights(placed), placed.keys)
        ]
        if head is not None:
            items.append(("loss", "loss", []))
        bar = keras.utils.Progbar(len(items), verbose=level, unit_name="layer")
        records = []
        for k, (layer, key, weights) in enumerate(items):
            bytes_of = weight_sizes(weights, num_slot_bytes)
            measured = measuring.layer(k)
            records.append(
                LayerProfile(layer, key, **bytes_of, measured=measured)
            )
            bar.update(k + 1)
    optimizer_name = "none"
    if optimizer is not None:
        optimizer_name = type(keras.optimizers.get(optimizer)).__name__
    record = Profile(
        loss=None if head is None else records.pop(),
        layers=tuple(records),
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
            f"{shapes(y)}, for outputs {shapes(output)}, and this "
            f"{type(error).__name__}: {error}"
        ) from error
    if not adds_up:
        raise ValueError(
            "`loss` must add up over rows to be measured by micro-batches: "
            "other losses are computed of the whole mini-batch, by no cell. "
            f"Received: loss={loss!r}. Leave out `y` and `loss`."
        )
    return Head(holder, True, False)


# ------------------------------------------------------- from layer to layer
_MOST_CALLS = 40

# So many times as long as was asked for, at most.
LONGER = 3


class Measuring:
    """Goes from layer to layer, with what those before made of the data.

    Attributes:
        call_seconds: What a call takes that computes nothing.
    """

    def __init__(
        self,
        placed: Placed,
        data: tuple[Nest, Nest],
        sizes: Sequence[int],
        head: Head | None,
        device: str,
        jit_compile: bool,
        seconds: float,
    ):
        self._placed = placed
        self._device = device
        self._jit_compile = jit_compile
        self._count = len(placed.layers) + (head is not None)
        self._models = {}
        for n in sizes:

            def first(t: tf.Tensor | None, n: int = n) -> tf.Tensor | None:
                return t if t is None else t[:n]

            with tf.device(device):
                x = tree.map_structure(first, data[0])
                others = tf.zeros([bytes_between(placed, n) // 4])
            labels = tree.map_structure(first, data[1])
            self._models[n] = self._model(placed, x, others, head, labels)
        # By what layers have in common, and by rows.
        self._timed: dict[Hashable, dict[int, tuple[Any, dict[str, Any]]]] = {}
        self._left = 0.98 * seconds
        self.call_seconds = self._nothing(0.02 * seconds)

    def _model(self, placed: Placed, x: Nest, *others: Any) -> LayersAlone:
        try:
            return LayersAlone(
                placed, x, self._device, self._jit_compile, *others
            )
        except Exception as error:
            raise _not_measured("a model", shapes(x), error) from error

    def _nothing(self, seconds: float) -> float:
        layers = [keras.Input((1,)), keras.layers.Identity()]
        source = source_of(layers)
        model = self._model(Placed(source, source.input_spec), tf.ones([1, 1]))
        # Behind it, its output is handed out.
        values = model.values(1)
        samples = _sampled(LoneLayer(model, 1, values), values, seconds)
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
        timed_of = self._timed.setdefault(self._alike(k), {})
        share = self._left / len({*map(self._alike, range(k, self._count))})
        results = []
        for i, (n, model) in enumerate(self._models.items()):
            values = model.values(k)
            if n not in timed_of:
                timed, samples = None, {"forward": [self.call_seconds] * 2}
                if not model.is_empty(k):
                    timed = LoneLayer(model, k, values)
                    start = time.perf_counter()
                    seconds = share / (len(self._models) - i)
                    samples = _sampled(timed, values, seconds)
                    taken = time.perf_counter() - start
                    share -= taken
                    self._left = max(0.0, self._left - taken)
                spreads: dict[str, Any] = dict.fromkeys(MEASURED)
                spreads |= {
                    kind: _spread(some) for kind, some in samples.items()
                }
                timed_of[n] = timed, spreads
            timed, by_kind = timed_of[n]
            outputs = [] if timed is None else timed.outputs(values)
            model.go_on(k, outputs)
            results.append(
                TaskSeconds(
                    n,
                    model.output_bytes(k),
                    model.kept_bytes[k],
                    **by_kind,
                )
            )
        return tuple(results)

    def _alike(self, k: int) -> Hashable:
        """Returns a key that layers share which are measured once."""
        return tuple(model.alike(k) for model in self._models.values())


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
