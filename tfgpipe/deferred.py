"""Models that are made without the memory of their weights.

Keras creates a variable where it is made: all of a model on the first device,
which the model may not fit on. Here a variable waits, with its shape, dtype and
initializer, until a `GPipe` creates it on the device of its cell:

    with deferred(): make()      shapes, initializers, seeds drawn
    GPipe(model)                 cell 0's variables on device 0, ...

Initializers have drawn their seeds when they were made, so that the values are
those that Keras gives. Keras's symbolic calls, by which functional models are
made and shapes are found, may read a variable that waits; nobody else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NoReturn

import keras

from tfgpipe import internals

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
        f"'{variable.path}' of shape {tuple(variable.shape)}, which is read or "
        "assigned, and has no value yet. Make `tfgpipe.GPipe(model, ...)` "
        "first, which creates each weight on the device of its cell; or make "
        "what is in no `GPipe` outside of the scope. A preset of KerasHub is "
        "loaded by `tfgpipe.load_preset(task, preset)`, without the scope, and "
        "not by `from_preset`."
    )
