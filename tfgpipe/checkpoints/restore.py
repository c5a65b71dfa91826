"""Goes on from a checkpoint.

Which variable is which is known by names. Of one model, they are not always the
same: they begin with the model's name, and Keras numbers layers that were given
none through the process. So these are tried, one after the other:

    the same names, in any order;       each is taken by its name
    those that only differ in their
    numbers count from 0 on, as they
    come
    other names                         an error

An optimizer's slots are found by their weights, whose names begin theirs.
"""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import re
import warnings
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.checkpoints import writer
from tfgpipe.checkpoints.folder import (
    Damaged,
    Folder,
    Json,
    Manifest,
    check_files,
    read_manifest,
)
from tfgpipe.checkpoints.writer import VALUES, wait_for_all
from tfgpipe.checks import as_integer
from tfgpipe.devices import placement


class Restored(NamedTuple):
    """From where a training goes on.

    Attributes:
        path: The checkpoint.
        step: Mini-batches that the training has seen, skipped ones too.
        epoch: Index of the epoch that the next mini-batch belongs to: the
            `initial_epoch` of `fit`.
        batch: Mini-batches of that epoch that it has seen.
    """

    path: str
    step: int
    epoch: int
    batch: int


class _Notes(NamedTuple):
    """Notes about a model that was restored.

    Attributes:
        more: Steps that the training has done and the model does not count.
        damaged: Of which steps there were damaged checkpoints.
    """

    more: int = 0
    damaged: Collection[int] = ()


_notes: weakref.WeakKeyDictionary[keras.Model, _Notes] = (
    weakref.WeakKeyDictionary()
)


def restore(
    model: keras.Model,
    folder: str | os.PathLike[str],
    step: int | None = None,
) -> Restored | None:
    """Gives a model the values of a checkpoint of `callbacks.Checkpoint`.

    Weights, layers' state and random seeds, the optimizer's state: training
    goes on with the bits of one that was never interrupted, with any number of
    cells, micro-batches and replicas that promises so, or as plain Keras.

    Args:
        model: A `GPipe`, or a plain Keras model, of the layers that were saved.
            Built; compiled with the same optimizer, or not compiled: then the
            optimizer's state is left out. A task that KerasHub has compiled is
            compiled as it is made. Variables are found by the names of layers.
        folder: The folder of the callback.
        step: Of which step; None for the last one. One that is damaged is left
            as it is, with a warning, and the one before it taken.

    Returns:
        From where to go on; None if there is no checkpoint, and the model is as
        it was.

    Raises:
        ValueError: If an argument is of the wrong kind, `step` is not there or
            is damaged, all checkpoints are damaged, or they are of another
            model.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> import tfgpipe
    >>> def make():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    ...     model = tfgpipe.GPipe(model, num_partitions=1)
    ...     model.compile("adam", "mse")
    ...     return model
    >>> x, folder = np.ones((16, 4)), tempfile.mkdtemp()
    >>> save = tfgpipe.callbacks.Checkpoint(folder)
    >>> history = make().fit(x, x, 4, epochs=2, verbose=0, callbacks=[save])
    >>> model = make()
    >>> resumed = restore(model, folder)
    >>> history = model.fit(
    ...     x, x, 4, epochs=3, initial_epoch=resumed.epoch, verbose=0
    ... )
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a `tfgpipe.GPipe` or another `keras.Model`. "
            f"Received: model={model!r}."
        )
    wait_for_all()
    checkpoints = Folder(folder)
    steps = checkpoints.steps()
    if step is not None and as_integer(step) not in steps:
        raise ValueError(
            "`step` must be the step of a checkpoint. Received: "
            f"step={step!r}, and folder={str(folder)!r} with steps {steps}."
        )
    damaged: set[int] = set()
    text = "A checkpoint must be as it was written. Received: "
    # The last one first, until one is whole.
    for known in reversed(steps) if step is None else [int(step)]:
        path = checkpoints.path_of(known)
        try:
            manifest = read_manifest(path, known)
            check_files(path, manifest)
            _assign(model, path, manifest)
        except Damaged as error:
            damaged.add(known)
            text += f"{path}: {error}. "
            continue
        if damaged:
            warnings.warn(
                f"{text}Left as it is; {path} was taken.", stacklevel=2
            )
        more = manifest.position.step - steps_of(model)
        _notes[model] = _Notes(more, damaged)
        return Restored(str(path), *manifest.position)
    if damaged:
        raise ValueError(
            f"{text}None is left to go on from: train anew, in another folder, "
            "or bring back a copy."
        )
    return None


def steps_of(model: keras.Model) -> int:
    """Returns how many mini-batches a model counts, skipped ones too.

    A `LossScaleOptimizer` does not count those that overflowed.
    """
    optimizer = getattr(model, "optimizer", None)
    updates = 0 if optimizer is None else internals.raw_iterations(optimizer)
    return updates + getattr(model, "num_skipped", 0)


def known_steps_of(model: keras.Model) -> int:
    """Returns `steps_of`; after `restore`, counted from what it returned."""
    return steps_of(model) + _notes.get(model, _Notes()).more


def is_known_damaged(model: keras.Model, step: int) -> bool:
    """Returns whether `restore` met a damaged checkpoint of a step."""
    return step in _notes.get(model, _Notes()).damaged


def _assign(model: keras.Model, path: pathlib.Path, manifest: Manifest) -> None:
    """Assigns all values of a checkpoint, which is whole."""
    if not model.built:
        raise ValueError(
            f"`model` must be built. Received: '{model.name}', which is not. "
            "Call `model.build(input_shape)` first, or let the layers begin "
            "with `keras.Input(shape)`."
        )
    _build_optimizer(model, [*manifest.optimizer])
    groups = writer.contents(model)
    if not groups["optimizer"]:  # not compiled
        del groups["optimizer"]
    if not (groups["skipped"] and manifest.variables.get("skipped")):
        del groups["skipped"]  # one of them does not skip
    names = internals.optimizer_names(model)
    if names and names != list(manifest.optimizer):
        raise ValueError(
            "`model` must have the kind of optimizer that it was trained by. "
            f"Received: {names}. Compile it with {list(manifest.optimizer)}: "
            f"{path} is of that."
        )
    indices = _indices(writer.variable_records(groups), manifest, path)
    for group, variables in groups.items():
        for i, variable in zip(indices[group], map(writer.storage, variables)):
            key = writer.key(group, i)
            read = functools.partial(_read, path, key, variable)
            if not placement.assign_rows(variable, read):
                variable.assign(read())


def _read(
    path: pathlib.Path,
    key: str,
    variable: tf.Variable,
    rows: slice | None = None,
) -> tf.Tensor:
    """Reads a value, or rows of it, on this host, which has the folder."""
    part = ""
    if rows is not None:
        # As "10 4 2,3:-": of a shape (10, 4), 3 rows from row 2 on, whole.
        sizes = " ".join(map(str, variable.shape))
        part = f"{sizes} {rows.start},{rows.stop - rows.start}"
        part += ":-" * (variable.shape.rank - 1)
    with tf.device("CPU:0"):
        try:
            [value] = tf.raw_ops.RestoreV2(
                prefix=str(path / VALUES),
                tensor_names=[key],
                shape_and_slices=[part],
                dtypes=[variable.dtype],
            )
        except tf.errors.OpError as error:
            raise Damaged(f"{key} cannot be read: {error.message}") from error
        return value


def _build_optimizer(model: keras.Model, names: list[str]) -> None:
    """Creates the slots; of a task of KerasHub, if these are its optimizers."""
    if hasattr(model, "build_optimizer"):
        planned = internals.with_inner(model.optimizer_to_be())
        if [type(optimizer).__name__ for optimizer in planned] == names:
            model.compile_as_task()
        model.build_optimizer()
    elif getattr(model, "optimizer", None) and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _indices(
    records: dict[str, list[list[Json]]], manifest: Manifest, path: pathlib.Path
) -> dict[str, list[int]]:
    """Returns the index of the saved variable for each of a model, by group."""
    indices: dict[str, list[int]] = {}
    for group, rows in records.items():
        saved = manifest.variables.get(group, [])
        if group == "skipped":  # one of them may not have seen outliers
            indices[group] = [*range(min(len(rows), len(saved)))]
            continue
        names, saved_names = _names(rows), _names(saved)
        if group == "model":
            same = matched(names, saved_names)
        else:  # found by their weights
            weights = _names(records["model"])
            theirs = _names(manifest.variables["model"])
            same = _places(
                _slots(names, dict(zip(weights, indices["model"]))),
                _slots(saved_names, {w: i for i, w in enumerate(theirs)}),
            )
        others = [None if i is None else saved[i] for i in same]
        differ = [
            f"{row}, and {other or 'none of that name'}"
            for row, other in zip(rows, others)
            if other is None or row[1:] != other[1:]
        ]
        if len(rows) != len(saved):
            differ.insert(0, f"{len(rows)} variables, and {len(saved)}")
        if differ:
            raise ValueError(
                f"`model` must have the {group} that was saved, by the names "
                f"of its layers. Received: {differ[0]} in {path}. Make, and "
                "compile, the model as it was for the training, with the same "
                "layers frozen."
            )
        indices[group] = [i for i in same if i is not None]
    return indices


def _names(rows: Sequence[Sequence[Json]]) -> list[str]:
    return [name for name, *_ in rows]


# ------------------------------------------- which variable is which, by names
_SEED = "seed_generator_state"


def matched(names: Sequence[str], saved: Sequence[str]) -> list[int | None]:
    """Returns the index of each of a model's names among saved names."""
    return _places(*_renumbered(_without_model(names), _without_model(saved)))


def _places(
    keys: Sequence[Hashable], saved: Sequence[Hashable]
) -> list[int | None]:
    """Returns where each key was saved; of equal ones, in their order."""
    places: dict[Hashable, list[int]] = collections.defaultdict(list)
    for i in reversed(range(len(saved))):
        places[saved[i]].append(i)
    return [places[key].pop() if places[key] else None for key in keys]


def _without_model(names: Sequence[str]) -> list[str]:
    """Returns names in a model, without the names of it and models around."""
    parts = [name.split("/") for name in names]
    inside = [p for p in parts if p[-1] != _SEED]
    while inside and all(len(p) > 2 and p[0] == inside[0][0] for p in inside):
        for part in inside:
            del part[0]
    return ["/".join(p) for p in parts]


def _renumbered(*lists: Sequence[str]) -> list[list[str]]:
    """Returns names that count from 0 where the lists have other numbers."""
    # dense_3, dense_7 -> dense#0, dense#1; the same numbers in all stay.
    by_stem: list[dict[str, dict[str, int]]] = []
    for names in lists:
        numbers: dict[str, dict[str, int]] = collections.defaultdict(dict)
        for part in "/".join(names).split("/"):
            same = numbers[_stem(part)]
            same.setdefault(part, len(same))
        by_stem.append(numbers)

    def renumbered(part: str, numbers: dict[str, dict[str, int]]) -> str:
        stem = _stem(part)
        if len({frozenset(other.get(stem, ())) for other in by_stem}) == 1:
            return part
        return f"{stem}#{numbers[stem][part]}"

    return [
        ["/".join(renumbered(p, numbers) for p in n.split("/")) for n in names]
        for names, numbers in zip(lists, by_stem)
    ]


def _stem(part: str) -> str:
    return re.sub(r"_\d+$", "", part)


def _slots(
    names: Sequence[str], weights: Mapping[str, int]
) -> list[tuple[int | None, str]]:
    """Returns the index of each slot's weight, or None, and its kind."""
    starts = {f"{w.replace('/', '_')}_": i for w, i in weights.items()}
    slots = []
    for name in names:
        rest = name.partition("/")[2] or name
        # The longest, as one name may begin with another.
        fitting = (start for start in starts if rest.startswith(start))
        start = max(fitting, key=len, default="")
        kind = [*map(_stem, rest.removeprefix(start).split("/"))]
        slots.append((starts.get(start), "/".join(kind)))
    return slots
