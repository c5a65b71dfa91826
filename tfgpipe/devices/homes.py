"""A layer computes at home, on the device of its weights, whoever calls it.

The layers of a pipeline are also those of the model that it was made of, of
models inside that one, and of what a task of KerasHub calls to generate:

    task.generate -> backbone.layer(x)    tf.device(home of layer): call(x)
    model.predict -> ... the same

In all of these, tensors go to the layers, and weights stay. What a layer adds
later, by `enable_lora` or `quantize`, is created at home, too. In a scope whose
values stand for those of variables, as in the steps of a pipeline, nothing is
at home anywhere, and calls are as they were.

XLA compiles a function for one device: a model whose layers are on several is
not compiled, which Keras would do by itself wherever there is a GPU.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices.names import accelerators, same_device
from tfgpipe.devices.placement import num_bytes

_is_away: list[bool] = []


def settle(cells: Sequence[Any], layers: Iterable[keras.layers.Layer]) -> None:
    """Gives layers and operations their homes: after variables have theirs.

    Args:
        cells: The cells.
        layers: Those of the model, which may hold layers of several cells.
    """
    internals.watch_calls(_called, _added, _spans)
    for cell in reversed(cells):  # the first one wins
        for step in cell.calls:
            for part in (step.operation, *internals.flat_layers(step.layer)):
                _settle(part, cell.device)
    for layer in layers:
        for part in internals.flat_layers(layer):
            held: collections.Counter[str] = collections.Counter()
            for weight in part.weights:
                held[weight.value.device] += num_bytes(weight)
            if held:
                _settle(part, max(held, key=held.__getitem__))
            if isinstance(part, keras.Model):
                internals.forget_functions(part)


@contextlib.contextmanager
def away() -> Iterator[None]:
    """Inside, calls are as if no layer had a home, as in files for serving."""
    _is_away.append(True)
    try:
        yield
    finally:
        _is_away.pop()


def _settle(part: Any, device: str) -> None:
    object.__setattr__(part, internals.HOME, device)


def _home_of(part: Any) -> str | None:
    return vars(part).get(internals.HOME)


def _called(part: Any) -> Any:
    """Around each call of a layer or operation: puts it onto its device."""
    home = _home_of(part)
    if home is None or _is_away or internals.variables_are_deferred():
        return contextlib.nullcontext()
    if internals.is_in_xla() and _is_elsewhere({home}):
        raise ValueError(
            "A model on several devices must be called without XLA, which "
            f"compiles for one. Received: layer '{part.name}', whose weights "
            f"are on {home}, in a function with jit_compile=True. Leave it "
            "out; or call a `tfgpipe.GPipe` of the model: its `compile("
            "jit_compile=True)` compiles each cell by itself."
        )
    return tf.device(home)


def _added(layer: keras.layers.Layer) -> Any:
    """Around the making of each variable of a layer."""
    home = _home_of(layer)
    return contextlib.nullcontext() if home is None else tf.device(home)


def _spans(model: keras.Model) -> bool:
    """Whether XLA cannot compile a model: it is not all on the first device."""
    homes = {_home_of(layer) for layer in internals.flat_layers(model)}
    return _is_elsewhere(homes - {None})


def _is_elsewhere(homes: Iterable[Any]) -> bool:
    first = accelerators()[0]
    return not all(same_device(home, first) for home in homes)
