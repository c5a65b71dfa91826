"""The model of a user, for commands: --model, --inputs, and rows for it.

--model names a function of the user's own code, which makes the model. What
goes into the model is known from its `keras.Input`s, from the function, or from
--inputs; rows are drawn at random.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple

import keras
import numpy as np
from absl import flags
from keras import tree

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.sequence import source_of

_EXAMPLE = "--model=my_module:make_model or --model=path/to/file.py:make_model"
_INPUT = re.compile(r"(?:(\w+)=)?(\w+)\[([\d,\s]*)\]")


def define_model(values: flags.FlagValues) -> None:
    """Defines --model and --inputs."""
    flags.DEFINE_string(
        "model",
        None,
        "Function that makes the model, module:function or file.py:function. "
        "It takes no arguments, and returns a Keras model or a list of layers; "
        "or one of these and its inputs, a nest of `keras.Input`s.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "inputs",
        None,
        "Dtype and shape of a row of each input, where the model does not say "
        "them: float32[128], or ids=int32[64],mask=bool[64].",
        flag_values=values,
    )


def define_rows(values: flags.FlagValues) -> None:
    """Defines what `random_rows` takes, besides the batch size."""
    flags.DEFINE_integer(
        "num_ids",
        2,
        "Inputs that are integers are drawn from those below it, from 0 on.",
        1,
        flag_values=values,
    )


class UserModel(NamedTuple):
    """What the user has named.

    Attributes:
        layers: A Keras model, or a list of layers.
        inputs: A nest of `keras.KerasTensor`s, where the model does not say
            them, or not all of their sizes; or None.
    """

    layers: Any
    inputs: Any = None

    def known_inputs(self) -> Any:
        """What goes into the model, with the sizes of a row.

        Raises:
            BadFlags: If a size is known from nowhere.
        """
        found = self.inputs
        if found is None:
            found = source_of(self.layers).input_spec
        leaves = [t for t in tree.flatten(found) if t is not None]
        open_ = [tuple(t.shape) for t in leaves if None in t.shape[1:]]
        if leaves and not open_:
            return found
        what = f"an input of shape {open_[0]}" if open_ else "no inputs"
        raise BadFlags(
            "--inputs must tell what goes into a model that does not say it. "
            f"Received: {what}. Pass dtype and shape of a row, such as "
            "--inputs=float32[128], begin the list with `keras.Input(shape)`, "
            "or let the function return (model, inputs)."
        )


def load(values: flags.FlagValues) -> UserModel:
    """Calls the function that --model names.

    Raises:
        BadFlags: If there is none, or it makes no model. What the user's own
            code raises is not caught.
    """
    made = _made(values.model)
    inputs = None
    if isinstance(made, tuple) and len(made) == 2 and not _is_layer(made[1]):
        made, inputs = made
        _check_inputs(values.model, inputs)
    is_list = isinstance(made, (list, tuple)) and made
    if not isinstance(made, keras.Model) and not is_list:
        raise BadFlags(
            "The function of --model must return a Keras model, a list of "
            "layers, or a pair of one of these and its inputs. Received: "
            f"{made!r} from --model={values.model}."
        )
    if values.inputs is not None:
        inputs = parsed_inputs(values.inputs)
    return UserModel(made, inputs)


def parsed_inputs(text: str) -> Any:
    """The inputs that a text tells: one, a list of them, or a dict.

    Raises:
        BadFlags: If the text tells none.

    Example:

    >>> one, other = parsed_inputs("float32[8, 3],int32[]")
    >>> one.shape, other.dtype
    ((None, 8, 3), 'int32')
    """
    parts = [
        _INPUT.fullmatch(part.strip())
        for part in re.split(r",(?![^\[]*\])", text)
    ]
    found = [part for part in parts if part is not None]
    names = [part[1] for part in found if part[1]]
    is_odd = len(found) < len(parts) or len({*names}) not in (0, len(parts))
    if is_odd or not all(_is_dtype(part[2]) for part in found):
        raise BadFlags(
            "--inputs must be dtypes and shapes of a row, with names for all "
            "or none: float32[128], or ids=int32[64],mask=bool[64]. Received: "
            f"--inputs={text}."
        )
    specs = [
        keras.Input(
            [int(size) for size in part[3].split(",") if size.strip()],
            dtype=part[2],
        )
        for part in found
    ]
    if names:
        return dict(zip(names, specs))
    return specs if len(specs) > 1 else specs[0]


def random_rows(specs: Any, num_rows: int, num_ids: int) -> Any:
    """Rows for inputs, the same ones each time.

    Args:
        specs: A nest of tensors with known sizes of a row.
        num_rows: How many.
        num_ids: Integers are drawn from those below it.

    Returns:
        The nest, with arrays: numbers of a normal distribution, integers,
        True and False.

    Raises:
        BadFlags: If an input is of another kind.
    """
    generator = np.random.default_rng(0)

    def rows(spec: Any) -> Any:
        if spec is None:
            return None
        shape = (num_rows, *spec.shape[1:])
        dtype = keras.backend.standardize_dtype(spec.dtype)
        if dtype == "bool":
            return generator.integers(0, 2, shape).astype(bool)
        if "int" in dtype:
            return generator.integers(0, num_ids, shape).astype(dtype)
        if "float" not in dtype:
            raise BadFlags(
                "The inputs of the model must be numbers, which can be drawn. "
                f"Received: an input of dtype {dtype!r}."
            )
        drawn = generator.standard_normal(shape).astype("float32")
        return keras.ops.convert_to_tensor(drawn, dtype)

    return tree.map_structure(rows, specs)


# ------------------------------------------------------------ the user's code
def _made(text: str) -> Any:
    """What the function that a text names returns; or a model that it names."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise BadFlags(
            f"--model must name a function, such as {_EXAMPLE}. Received: "
            f"--model={text}."
        )
    module = _file(place) if place.endswith(".py") else _module(place)
    if not hasattr(module, name):
        own = [n for n in vars(module) if not n.startswith("_")]
        close = difflib.get_close_matches(name, own, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise BadFlags(
            f"--model must name a function of {place}. Received: {name!r}, "
            f"which it does not have.{hint}"
        )
    found = getattr(module, name)
    if isinstance(found, keras.Model) or not callable(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise BadFlags(
            "The function of --model must do without arguments. Received: "
            f"--model={text}, with {error}. Write one that calls it."
        ) from error
    except ValueError:  # some that are no Python have no signature
        pass
    return found()


def _file(path: str) -> Any:
    """Imports a file; what is beside it can be imported, as by a script."""
    file = pathlib.Path(path).resolve()
    if not file.is_file():
        raise BadFlags(
            f"--model must name a file that there is. Received: {path!r} in "
            f"{os.getcwd()}."
        )
    _add_to_path(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise BadFlags(f"--model must name a Python file. Received: {path!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    """Imports a module; those of the working directory are found."""
    _add_to_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != name and not name.startswith(f"{missing}."):
            raise  # it is there, but something that it needs is not
        raise BadFlags(
            "--model must name a module that Python finds, from the working "
            f"directory {os.getcwd()} or installed. Received: {name!r}. For a "
            "file elsewhere, give its path: --model=path/to/file.py:function."
        ) from error


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _is_layer(value: Any) -> bool:
    return isinstance(value, keras.layers.Layer)


def _is_dtype(text: str) -> bool:
    try:
        keras.backend.standardize_dtype(text)
    except ValueError:
        return False
    return True


def _check_inputs(text: str, inputs: Any) -> None:
    leaves = [t for t in tree.flatten(inputs) if t is not None]
    if leaves and all(isinstance(t, keras.KerasTensor) for t in leaves):
        return
    raise BadFlags(
        "The function of --model must return, beside the model, a nest of "
        f"`keras.Input`s. Received: {inputs!r} from --model={text}."
    )
