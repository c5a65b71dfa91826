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
the others would leave of its caches is imitated, see `LayersAlone`. What a
loop keeps for its gradient is not seen. Side effects, such as of
`tf.print`, happen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import inputs as inputs_lib
from tfgpipe import internals
from tfgpipe.cells import Head
from tfgpipe.checks import as_count, checked_bool, checked_positive
from tfgpipe.costs import (
    Placed,
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
from tfgpipe.loss import loss_obstacle
from tfgpipe.profiles.lone_layer import LayersAlone, LoneLayer
from tfgpipe.profiles.profile_record import LayerProfile, Profile
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
            and compiled. Every task runs three times at least.
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
    if jit_compile != "auto":
        checked_bool("jit_compile", jit_compile)
    num_slot_bytes = slot_bytes_of(optimizer)
    source = source_of(layers)
    if source.problems:
        raise ValueError("\n".join(source.problems))
    name = names.accelerators()[0]
    if device is not None:
        (name,) = names.resolved([device])
    data = inputs_lib.as_tensors(x, y)
    check_rows(*data, None)
    sizes = _sizes(micro_batch_sizes, first_tensor(data[0]).shape[0])
    compiles = names.only_compiles([name]) or (
        names.has_accelerator([name])
        if jit_compile == "auto"
        else bool(jit_compile)
    )
    with (
        internals.outside_functions(),
        internals.without_strategy(),
        internals.random_state_kept(),
    ):
        x, spec = _as_taken(source, data[0])
        placed = Placed(source, spec)
        head = _head(layers, loss, x, data[1], placed.output)
        labels = None if head is None else (data[1], None)
        with _naming("a model"):
            call_seconds = _call_seconds(name, compiles, 0.02 * seconds)
            models = [
                LayersAlone(
                    placed,
                    (_first(n, x, name), _first(n, labels)),
                    name,
                    compiles,
                    head,
                )
                for n in sizes
            ]
        items = [
            (layer.name, key, weights)
            for (layer, weights), key in zip(with_weights(placed), placed.keys)
        ]
        if head is not None:
            items.append(("loss", "loss", []))
        level = 1 if verbose == "auto" else verbose
        bar = keras.utils.Progbar(len(items), verbose=level, unit_name="layer")
        kinds = sum(model.num_kinds(len(items)) for model in models)
        share = 0.98 * seconds / max(kinds, 1)
        records = []
        for k, (layer, key, weights) in enumerate(items):
            bytes_of = weight_sizes(weights, num_slot_bytes)
            with _naming(f"layer '{layer}'"):
                measured = tuple(
                    model.measured(k, share, call_seconds) for model in models
                )
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
        call_seconds=call_seconds,
        jit_compile=compiles,
        optimizer=optimizer_name,
        versions={"tensorflow": tf.__version__, "keras": keras.__version__},
    )
    record.warn_if_spread()
    return record


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Inside, an error says what cannot be measured."""
    try:
        yield
    except Exception as error:  # of many kinds
        words = [
            "The tasks of each layer must run by themselves to be measured. "
            f"Received: {name}, and this {type(error).__name__}: {error}",
            *getattr(error, "__notes__", []),
            "Correct the layer; pass smaller `micro_batch_sizes` if memory is "
            "short; or give costs by hand, as pairs (layer, cost).",
        ]
        raise ValueError("\n".join(words)) from error


def _first(n: int, nest: Nest, device: str | None = None) -> Any:
    """Returns the first rows of all tensors."""
    with tf.device(device):
        return tree.map_structure(lambda t: t if t is None else t[:n], nest)


def _call_seconds(device: str, jit_compile: bool, seconds: float) -> float:
    """Measures a call that computes nothing."""
    source = source_of([keras.Input((1,)), keras.layers.Identity()])
    placed, data = Placed(source, source.input_spec), (tf.ones([1, 1]), None)
    model = LayersAlone(placed, data, device, jit_compile)
    # Behind it, its output is handed out.
    values = model.values(1)
    return LoneLayer(model, 1, values).sampled(values, seconds)["forward"].low


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
            f"Received: loss={loss!r} and y={shapes(y)}."
        )
    holder = keras.Model()
    specs = as_specs(y), output, None
    holder.compile(loss=loss)
    internals.build_losses_and_metrics(holder, as_specs(x), *specs)
    if loss_obstacle(holder, *specs) is not None:
        raise ValueError(
            "`loss` must add up over rows to be measured by micro-batches. "
            f"Received: loss={loss!r}. Leave out `y` and `loss`."
        )
    return Head(holder, True, False)
