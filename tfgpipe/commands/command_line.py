"""Flags, messages, exit codes and sub-commands of programs; a user's model.

Each has a set of flags, so that several of them can be imported. --model names
a function of the user's, which makes the model. What goes into the model is
known from its `keras.Input`s, or from the function; rows are drawn at random.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import keras
import numpy as np
from absl import flags
from keras import tree

from tfgpipe.internals import Nest
from tfgpipe.sequence import source_of

_Item = TypeVar("_Item")

_QUIET = 10.0  # seconds, until it is said what is done; then twice as many


def new_flags() -> flags.FlagValues:
    """Returns flags with --help alone."""
    values = flags.FlagValues()
    flags.DEFINE_boolean(
        "help", False, "Print this.", short_name="h", flag_values=values
    )
    return values


def define_count(
    values: flags.FlagValues, name: str, text: str, default: int | None = None
) -> None:
    """Defines a flag that is a positive number."""
    flags.DEFINE_integer(name, default, text, 1, flag_values=values)


def define_cells(
    values: flags.FlagValues, k: int | None = None, m: int | None = None
) -> None:
    """Defines --num_partitions and --num_micro_batches."""
    define_count(values, "num_partitions", "K, the number of cells.", k)
    define_count(
        values, "num_micro_batches", "M, the number of micro-batches.", m
    )


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


def run(
    name: str,
    values: flags.FlagValues,
    usage: str | None,
    body: Callable[[flags.FlagValues], int | None],
    argv: Sequence[str],
) -> int:
    """Parses flags and does a command's work.

    Args:
        name: Of the command, such as "tfgpipe plan".
        values: Its flags, not parsed yet; they stay so.
        usage: Text of --help before the flags.
        body: Does the work; may return an exit code. Errors about what the
            user gave are `ValueError`, `FileNotFoundError`, or `ImportError`
            for a package that is not installed.
        argv: The program and its flags.

    Returns:
        The exit code: 0, or of the body; 2 for bad flags; 130 after Ctrl-C.
    """
    values = copy.deepcopy(values)  # can be parsed once
    try:
        rest = values(list(argv))[1:]
        if values.help:
            print(f"{usage}\n{values.get_help(include_special_flags=False)}")
            return 0
        if rest:
            raise ValueError(f"Expected only flags. Received: {rest}.")
        return body(values) or 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (flags.Error, ValueError, FileNotFoundError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def run_sub_command(
    program: str,
    commands: Mapping[str, str],
    body: Callable[[str, ModuleType, flags.FlagValues], int | None],
    argv: Sequence[str],
    package: str | None = None,
) -> int:
    """Does the work of a sub-command, or lists them all.

    Args:
        program: Its name, of a script, such as "tfgpipe", or of a package
            that is run by `python -m`, such as "tools.bench".
        commands: What each sub-command does, by name.
        body: Called with a sub-command's name, its module and its parsed flags.
            Its errors are as for `run`.
        argv: The program, the sub-command, its flags.
        package: Where a sub-command is the module of its name, with `FLAGS`,
            its flags. `None` if the program is that package.

    Returns:
        The exit code, as of `run`.
    """
    called = program if package else f"python -m {program}"
    name = argv[1] if len(argv) > 1 else ""
    if name in ("--help", "-h", "help"):
        print(f"Usage: {called} SUB-COMMAND [FLAGS]\n")
        for command, purpose in commands.items():
            print(f"  {command:12} {purpose}")
        print(f"\n{called} SUB-COMMAND --help lists its flags.")
        return 0
    if name not in commands:
        print(
            f"{program}: The first argument must be a sub-command: one of "
            f"{', '.join(commands)}. Received: {name!r}.",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(f"{package or program}.{name}")
    return run(
        f"{program} {name}" if package else program,
        module.FLAGS,
        f"Usage: {called} {name} [FLAGS]\n\n{module.__doc__ or ''}",
        lambda values: body(name, module, values),
        [argv[0], *argv[2:]],
    )


def require(values: flags.FlagValues, *names: str) -> None:
    """Refuses flags that lack some without which there is nothing to do."""
    lacking = [f"--{name}" for name in names if values[name].value is None]
    if lacking:
        raise ValueError(
            f"{' and '.join(lacking)} must be given. --help shows an example."
        )


def output_path(text: str | None) -> pathlib.Path | None:
    """Returns the file of --output; None for none.

    Raises:
        ValueError: If its folder is missing, before there is work to lose.
    """
    if text is None:
        return None
    path = pathlib.Path(text)
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"--output must be in a folder that there is. Received: {text}."
        )
    return path


@contextlib.contextmanager
def doing(work: str) -> Iterator[None]:
    """Inside, says on the standard error now and then what is done.

    After ten seconds, after twenty more, and so on. `work` is in words, as
    "building the model".
    """
    start, has_ended = time.monotonic(), threading.Event()

    def speak() -> None:
        quiet = _QUIET
        while not has_ended.wait(quiet):
            seconds = time.monotonic() - start
            print(f"{work}, {seconds:.0f} s", file=sys.stderr, flush=True)
            quiet *= 2

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def progress(items: Iterable[_Item], work: str) -> Iterator[_Item]:
    """Yields items; says now and then how many are done, see `doing`."""
    known = list(items)
    for count, item in enumerate(known):
        with doing(f"{work}: {count} of {len(known)}"):
            yield item


# ------------------------------------------------------ the model of a user
def load_model(text: str) -> tuple[keras.Model | Sequence[keras.Layer], Any]:
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
