"""The model of a user, for commands: --model, and rows for it.

--model names a function of the user's, which makes the model. What goes into
the model is known from its `keras.Input`s, or from the function; rows are drawn
at random.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import flags
from keras import tree

from tfgpipe.commands.command_line import BadFlags
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
        BadFlags: If there is none, it makes no model, or inputs are not known.
            What the user's code raises is not caught.
    """
    model, inputs = _result_of(text), None
    if (
        isinstance(model, tuple)
        and len(model) == 2
        and not isinstance(model[1], keras.Layer)
    ):
        model, inputs = model
    if not isinstance(model, (keras.Model, list, tuple)) or not model:
        raise BadFlags(
            "The function of --model must return a Keras model, a list of "
            "layers, or a pair of one of these and its inputs. Received: "
            f"{model!r} from --model={text}."
        )
    if inputs is None:
        inputs = source_of(model).input_spec
    leaves = [t for t in tree.flatten(inputs) if t is not None]
    if (
        not leaves
        or not all(isinstance(t, keras.KerasTensor) for t in leaves)
        or any(None in t.shape[1:] for t in leaves)
    ):
        raise BadFlags(
            "The function of --model must tell what goes into the model, with "
            f"all sizes of a row. Received: {inputs!r} from --model={text}. "
            "Begin the list with `keras.Input(shape)`, or return (model, "
            "inputs) with a nest of `keras.Input`s."
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
        if "float" not in dtype:
            raise BadFlags(
                "The inputs of the model must be numbers, which can be drawn. "
                f"Received: an input of dtype {dtype!r}."
            )
        drawn = generator.standard_normal(shape).astype("float32")
        return keras.ops.convert_to_tensor(drawn, dtype)

    return tree.map_structure(rows, inputs)


def _result_of(text: str) -> Any:
    """Returns what the function that a text names returns."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise BadFlags(
            "--model must name a function, such as "
            "--model=my_module:make_model or --model=path/to/file.py:"
            f"make_model. Received: --model={text}."
        )
    path = pathlib.Path(place).resolve()
    is_file = place.endswith(".py")
    folder = str(path.parent) if is_file else os.getcwd()
    if folder not in sys.path:  # what is beside it can be imported
        sys.path.insert(0, folder)
    if is_file:
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise BadFlags(
            f"--model must name a function of {place}. Received: {name!r}, "
            "which is none."
        )
    return function()
