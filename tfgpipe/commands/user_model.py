"""The model of a user, for commands: --model, and rows for it.

--model names a function of the user's, which makes the model. What goes into
the model is known from its `keras.Input`s, or from the function; rows are drawn
at random.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import flags
from keras import tree

from tfgpipe.internals import Nest
from tfgpipe.sequence import source_of


def define_model(values: flags.FlagValues) -> None:
    """Defines --model."""
    flags.DEFINE_string(
        "model",
        None,
        "Function that makes the model, module:function or file.py:function. "
        "It takes no arguments, and returns a Keras model or a list of layers; "
        "or one of these and its inputs, a nest of `keras.Input`s.",
        flag_values=values,
    )


def load(text: str) -> tuple[keras.Model | Sequence[keras.Layer], Any]:
    """Calls the function that --model names.

    Returns:
        The model or the layers; and its inputs, a nest of `keras.KerasTensor`s
        with the sizes of a row.

    Raises:
        ValueError: If there is none, or inputs are not known. What the user's
            code raises is not caught.
    """
    model, inputs = _result_of(text), None
    if (
        isinstance(model, tuple)
        and len(model) == 2
        and not isinstance(model[1], keras.Layer)
    ):
        model, inputs = model
    if inputs is None:
        inputs = source_of(model).input_spec
    leaves = [t for t in tree.flatten(inputs) if t is not None]
    if (
        not leaves
        or not all(isinstance(t, keras.KerasTensor) for t in leaves)
        or any(None in t.shape[1:] for t in leaves)
    ):
        raise ValueError(
            f"--model must tell what goes into the model. Received: {inputs!r} "
            f"from {text}. Begin the list with `keras.Input(shape)`, with all "
            "sizes, or return (model, inputs) with a nest of `keras.Input`s."
        )
    return model, inputs


def random_rows(inputs: Nest, num_rows: int) -> Any:
    """Returns so many rows for a nest of inputs, the same ones each time.

    Floats are of a normal distribution; integers are 0 or 1, which every table
    has.
    """
    generator = np.random.default_rng(0)

    def rows(spec: keras.KerasTensor | None) -> Any:
        if spec is None:
            return None
        shape = (num_rows, *spec.shape[1:])
        dtype = keras.backend.standardize_dtype(spec.dtype)
        if dtype == "bool" or "int" in dtype:
            return generator.integers(0, 2, shape).astype(dtype)
        drawn = generator.standard_normal(shape).astype("float32")
        return keras.ops.convert_to_tensor(drawn, dtype)

    return tree.map_structure(rows, inputs)


def _result_of(text: str) -> Any:
    """Returns what the function that a text names returns."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(
            "--model must be my_module:make_model or path/file.py:make_model. "
            f"Received: {text}."
        )
    folder = pathlib.Path.cwd()
    if place.endswith(".py"):
        path = pathlib.Path(place).resolve()
        folder, place = path.parent, path.stem
    sys.path.insert(0, str(folder))  # what is beside it can be imported, too
    return getattr(importlib.import_module(place), name)()
