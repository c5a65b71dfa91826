"""Models that no single device has to hold: made, and loaded from presets.

Keras creates a variable where it is made: all of a model on the first device.
Here a variable waits, with its shape, dtype and initializer, until a `GPipe`
creates it on the device of its cell:

    with deferred(): make()      shapes, initializers, seeds drawn
    GPipe(model)                 cell 0's variables on device 0, ...

Initializers have drawn their seeds when they were made, so that the values are
those that Keras gives. Keras's symbolic calls, by which functional models are
made and shapes are told, may read a variable that waits; nobody else.

KerasHub makes a backbone, loads its weights, and makes the task around it. A
pipeline cannot be cut before the task is there. So `load_preset` runs
`from_preset` twice, each time without memory:

    once     variables wait; what would be assigned is compared with them
    GPipe    creates the variables of the first run, each on its device
    again    what is assigned to the n-th variable goes to the n-th of the first

That knows nothing of the formats of files, which KerasHub reads one variable
after the other: `.h5`, shards of it, or what it converts of safetensors.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import numpy as np

from tfgpipe import internals
from tfgpipe.checks import checked_path
from tfgpipe.devices import placement
from tfgpipe.model import GPipe

# What no optimizer trains and has no more elements than this is made at once:
# seeds, metrics and counters, which may belong to no layer.
_FEW = 1024


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Models that are made inside take no memory until they are a `GPipe`.

    A functional model, a `keras.Sequential`, a task of KerasHub, or layers of a
    list. `tfgpipe.GPipe(model, ...)`, inside or afterwards, then creates each
    weight on the device of its cell, with the bits that Keras would give for
    the same seeds; so a model can be made that no device, and not the host, can
    hold. `tfgpipe.plan(model, ...)` says before whether it will fit.

    Reading or assigning a weight before is a `ValueError`. Load weights, add
    adapters to them and quantise when there is a `GPipe`. Values that are given
    as arrays are in memory as they were.

    Example:

    >>> import tfgpipe
    >>> with tfgpipe.deferred():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> pipeline = tfgpipe.GPipe(model, num_partitions=1)
    >>> pipeline.get_weights()[0].shape
    (8, 4)
    """
    refused: list[ValueError] = []

    def refuse(variable: keras.Variable) -> NoReturn:
        refused.append(_refusal(variable))
        raise refused[-1]

    with internals.postponed(_waits, refuse):
        try:
            yield
        except ValueError as error:
            # Keras counts what it could not load, and may not say why.
            if refused and "could not be loaded" in str(error):
                raise refused[0] from error
            raise


def _waits(variable: keras.Variable) -> bool:
    return variable.trainable or math.prod(variable.shape) > _FEW


def _refusal(variable: keras.Variable) -> ValueError:
    return ValueError(
        "A model that was made in `tfgpipe.deferred()` must become a "
        "`tfgpipe.GPipe` before its weights are used. Received: variable "
        f"'{variable.path}' of shape {tuple(variable.shape)}, which has no "
        "value yet. A preset of KerasHub is loaded by `tfgpipe.load_preset("
        "task, preset)`, without the scope."
    )


# ---------------------------------------------------------------------- presets
def load_preset(
    task: type | str,
    preset: str | os.PathLike[str],
    num_partitions: int | None = None,
    num_micro_batches: int | None = None,
    **kwargs: Any,
) -> GPipe:
    """Loads a preset of KerasHub that no single device has to hold.

    Each weight is created on the device of its cell and read from the file by
    itself: a device holds no more than its cells and, for a moment, a variable
    twice; the host no more than the largest variable, or than what KerasHub
    reads of a file at once.

    Args:
        task: A class of `keras_hub.models`, or its name: a task, such as
            "LlamaCausalLM" or "CausalLM", or a backbone.
        preset: A folder that `save_to_preset` wrote, or a name or handle, as
            for `from_preset`.
        num_partitions: K, as for `GPipe`.
        num_micro_batches: M, as for `GPipe`.
        **kwargs: Other arguments of `GPipe`; and all else for `from_preset`,
            such as `dtype="bfloat16"`, `num_classes=3` or `load_weights=False`.

    Returns:
        The `tfgpipe.GPipe`, whose `model` is the task. Add adapters to it by
        `pipeline.model.backbone.enable_lora(rank)`, or quantise it. It trains
        as KerasHub has compiled the task, until you `compile` it.

    Raises:
        ImportError: If KerasHub is not installed.
        ValueError: If the preset is of another class, or its weights are
            missing, damaged or of another shape: before memory is taken.

    Example:

    >>> pipeline = load_preset(
    ...     "LlamaCausalLM", "folder/of/preset", 4, 8, dtype="bfloat16"
    ... )  # doctest: +SKIP
    >>> pipeline.generate("Once upon a time", max_length=64)  # doctest: +SKIP
    """
    cls = _class_of(task)
    checked_path("preset", preset)
    preset = os.fspath(preset)
    known = inspect.signature(GPipe.__init__).parameters
    arguments = {n: kwargs.pop(n) for n in [*kwargs] if n in known}
    read: set[int | None] = set()
    wrong: list[str] = []

    def compare(n: int | None, variable: keras.Variable, value: Any) -> None:
        read.add(n)
        shape = value.shape if hasattr(value, "shape") else np.shape(value)
        if tuple(shape) != tuple(variable.shape):
            wrong.append(
                f"'{variable.path}' has shape {tuple(variable.shape)}, and "
                f"{tuple(shape)} in the preset"
            )

    with _explained(cls, preset):
        model, made = _run(cls, preset, kwargs, compare)
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}.")
    for n in read:
        if n is not None:
            internals.start_with_zeros(made[n])
    pipeline = GPipe(model, num_partitions, num_micro_batches, **arguments)

    failed: list[Exception] = []

    def assign(n: int | None, variable: keras.Variable, value: Any) -> None:
        try:
            placement.assign_in_pieces(
                variable if n is None else made[n], value
            )
        except Exception as error:  # Keras goes on, and may only warn
            failed.append(error)
            raise

    if read:
        with (
            internals.names_kept(),
            internals.random_state_kept(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the first run has said all
            try:
                _run(cls, preset, kwargs, assign)
            finally:
                if failed:
                    raise failed[0]
    return pipeline


def _class_of(task: object) -> Any:
    """Returns a class of KerasHub that can be loaded, by itself or by name."""
    from keras_hub import models

    cls = getattr(models, task, None) if isinstance(task, str) else task
    if isinstance(cls, type) and hasattr(cls, "from_preset"):
        return cls
    raise ValueError(
        "`task` must be a class of `keras_hub.models` that has `from_preset`, "
        f"or its name, such as 'CausalLM'. Received: task={task!r}."
    )


def _run(
    cls: Any, preset: str, kwargs: dict[str, Any], assign: Callable
) -> tuple[keras.Model, list[keras.Variable]]:
    """Runs `from_preset` without memory.

    Args:
        cls: The class.
        preset: The preset.
        kwargs: Other arguments.
        assign: Called with the number of a variable, among all that are made,
            or None if it was there before; with the variable; and with what
            would be assigned to it.

    Returns:
        The model, and the variables that were made, in order.
    """

    def numbered(variable: keras.Variable, value: Any) -> None:
        n = next((n for n, v in enumerate(made) if v is variable), None)
        assign(n, variable, value)

    with (
        deferred(),
        internals.made_variables() as made,
        internals.assigning_by(numbered),
    ):
        return cls.from_preset(preset, **kwargs), made


@contextlib.contextmanager
def _explained(cls: Any, preset: str) -> Iterator[None]:
    """Says of what fails inside that it is the preset's fault."""
    try:
        yield
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"`preset` must be one that `{cls.__name__}.from_preset` can load, "
            f"with all its weights. Received: preset={preset!r}, and this "
            f"{type(error).__name__}: {error}\nNo memory was taken. To begin "
            "with new weights, pass load_weights=False."
        ) from error
