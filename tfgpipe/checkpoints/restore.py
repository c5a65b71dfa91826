"""Goes on from a checkpoint.

Which variable is which is known by names. Of one model, they are not always the
same: they begin with the model's name, and Keras numbers layers that were given
none through the process. So these are tried, one after the other:

    the same names, in any order;       each is taken by its name
    those that only differ in their
    numbers count from 0 on, as they
    come
    other names, of which none of the   in their order, which is told: layers
    old ones has another place          may have new names
    else                                an error: layers were moved

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
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
        restored: What `restore` returned; None if it was not.
        steps: With how many steps the model counted then.
        damaged: Of which steps there were damaged checkpoints.
        settings: Of its optimizer, when the training began; None if unknown.
    """

    restored: Restored | None = None
    steps: int = 0
    damaged: Collection[int] = ()
    settings: Mapping[str, Json] | None = None


_restored: weakref.WeakKeyDictionary[keras.Model, _Notes] = (
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
            compiled as it is made. Variables are found by their names.
            Where layers have other names than those that were saved, they are
            found by their order, with a warning, unless some have changed
            places. A warning says, too, what the optimizer is told otherwise.
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
    damaged: dict[int, str] = {}
    # The last one first, until one is whole.
    for known in reversed(steps) if step is None else [int(step)]:
        path = checkpoints.path_of(known)
        try:
            manifest = read_manifest(path, known)
            check_files(path, manifest)
            _assign(model, path, manifest)
        except Damaged as error:
            damaged[known] = f"{path}: {error}."
            continue
        if damaged:
            warnings.warn(
                "A checkpoint must be as it was written. Received: "
                f"{' '.join(damaged.values())} Left as it is; {path} was "
                "taken.",
                stacklevel=2,
            )
        restored = Restored(str(path), *manifest.position)
        _restored[model] = _Notes(
            restored, steps_of(model), set(damaged), manifest.settings
        )
        return restored
    if damaged:
        raise ValueError(
            "A checkpoint must be as it was written. Received: "
            f"{' '.join(damaged.values())} None is left to go on from: train "
            "anew, in another folder, or bring back a copy."
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
    restored, before, *_ = _restored.get(model, _Notes())
    steps = steps_of(model)
    return steps if restored is None else restored.step + steps - before


def is_known_damaged(model: keras.Model, step: int) -> bool:
    """Returns whether `restore` met a damaged checkpoint of a step."""
    return step in _restored.get(model, _Notes()).damaged


def first_settings_of(model: keras.Model) -> Mapping[str, Json]:
    """Returns what an optimizer was told when its training began."""
    notes = _restored.get(model, _Notes())
    if not notes.settings:
        notes = notes._replace(settings=internals.optimizer_settings(model))
        _restored[model] = notes
    return notes.settings or {}


def _assign(model: keras.Model, path: pathlib.Path, manifest: Manifest) -> None:
    """Assigns all values of a checkpoint, which is whole."""
    if not model.built:
        raise ValueError(
            "`model` must be built, to have variables. Received: "
            f"'{model.name}', which is not. Call `model.build(input_shape)` "
            "first, or let the list of layers begin with `keras.Input(shape)`."
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
            f"Received: {names}, and {list(manifest.optimizer)} in {path}. "
            "Compile the model as it was for the training."
        )
    indices = _indices(writer.variable_records(groups), manifest, path)
    _tell_settings(model, manifest, path)
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
    names, saved_names = (
        {group: [name for name, *_ in rows] for group, rows in all_rows.items()}
        for all_rows in (records, manifest.variables)
    )
    indices: dict[str, list[int]] = {}
    for group, rows in records.items():
        saved = manifest.variables.get(group, [])
        if group == "skipped":  # one of them may not have seen outliers
            indices[group] = [*range(min(len(rows), len(saved)))]
            continue
        what = "layers" if group == "model" else "an optimizer"
        if len(rows) != len(saved):
            raise _of_another_model(
                what,
                f"{len(rows)} variables of the {group}, and {len(saved)} in "
                f"{path}",
            )
        try:
            if group == "model":
                indices[group], other = matched(
                    names[group], saved_names[group]
                )
                if other is not None:
                    _tell_names(*other, path)
            else:
                indices[group] = matched_slots(
                    names[group],
                    saved_names[group],
                    names["model"],
                    saved_names["model"],
                    indices["model"],
                )
        except Mismatch as error:
            raise _of_another_model(
                what,
                f"'{error.name}', where {path} has '{error.saved}', and others "
                "in other places, too",
            ) from None
        # Of the same place, and yet of another size.
        for (name, *kind), i in zip(rows, indices[group]):
            saved_name, *saved_kind = saved[i]
            if kind != saved_kind:
                raise _of_another_model(
                    what,
                    f"'{name}' of shape and dtype {kind}, where {path} has "
                    f"'{saved_name}' of {saved_kind}",
                )
    return indices


def _of_another_model(what: str, received: str) -> ValueError:
    return ValueError(
        f"`model` must have {what} like those that were saved. Received: "
        f"{received}. Make, and compile, the model as it was for the training, "
        "with the same layers frozen."
    )


def _tell_names(name: str, saved: str, path: pathlib.Path) -> None:
    warnings.warn(
        "`model` should have the names that were saved, by which variables are "
        f"found. Received: '{name}', where {path} has '{saved}'. All were "
        "taken in the order of the layers: see that it is the same.",
        stacklevel=4,
    )


def _tell_settings(
    model: keras.Model, manifest: Manifest, path: pathlib.Path
) -> None:
    """Says what the optimizer is told otherwise than at first."""
    saved = manifest.settings
    differ = [
        f"{name}={value!r} (at first {saved[name]!r})"
        for name, value in internals.optimizer_settings(model).items()
        if name in saved and value != saved[name]
    ]
    if differ:
        warnings.warn(
            "The optimizer should be as it was for the training. Received: "
            f"{', '.join(differ)}, and {path}. The learning rate is the saved "
            "one now, if it is no schedule: to change it, assign "
            "`model.optimizer.learning_rate` after this. All else is as "
            "received.",
            stacklevel=4,
        )


# ------------------------------------------- which variable is which, by names
_NUMBERED = re.compile(r"(.+?)_(\d+)")

_SEED = "seed_generator_state"

_Key = TypeVar("_Key", bound=Hashable)


class Mismatch(Exception):
    """Two names that should be the same, the model's and the saved."""

    def __init__(self, name: str, saved: str) -> None:
        super().__init__(name, saved)
        self.name = name
        self.saved = saved


def matched(
    names: Sequence[str], saved: Sequence[str]
) -> tuple[list[int], tuple[str, str] | None]:
    """Returns the index of each of a model's names among as many saved names.

    And two names that differ, the model's and the saved, if order alone tells
    which is which.

    Raises:
        Mismatch: If layers have other places.
    """
    mine, theirs = _without_model(names), _without_model(saved)
    indices = _by_key(*map(_counted, _renumbered(mine, theirs)))
    if indices is not None:
        return indices, None
    in_order = [*range(len(names))]
    places = {name: i for i, name in enumerate(theirs)}
    for i, name in enumerate(mine):
        is_given = not any(map(_NUMBERED.fullmatch, name.split("/")))
        if is_given and places.get(name, i) != i and _SEED not in name:
            raise Mismatch(names[i], saved[i])
    pairs = zip(names, saved, mine, theirs)
    return in_order, next((a, b) for a, b, c, d in pairs if c != d)


def matched_slots(
    names: Sequence[str],
    saved: Sequence[str],
    weights: Sequence[str],
    saved_weights: Sequence[str],
    indices: Sequence[int],
) -> list[int]:
    """Returns the index of each name in an optimizer among those saved.

    `indices` are what `matched` returned for the names of weights.

    Raises:
        Mismatch: If it is kept for other weights.
    """
    # (Index of the weight among those saved, what the slot is of it).
    mine = [
        (None if place is None else indices[place], kind)
        for place, kind in _slots(names, weights)
    ]
    theirs = _slots(saved, saved_weights)
    by_key = _by_key(_counted(mine), _counted(theirs))
    if by_key is not None:
        return by_key
    for i, key in enumerate(mine):
        if key[0] is not None and key not in theirs:
            raise Mismatch(names[i], saved[i])
    return [*range(len(names))]  # of an optimizer that names otherwise


def _by_key(keys: Sequence[_Key], saved: Sequence[_Key]) -> list[int] | None:
    """Returns the index of each key among those saved, if both are the same."""
    places = {key: i for i, key in enumerate(saved)}
    return [places[k] for k in keys] if places.keys() == {*keys} else None


def _counted(keys: Iterable[_Key]) -> list[tuple[_Key, int]]:
    """Returns keys with how many equal ones come before each."""
    seen: collections.Counter[_Key] = collections.Counter()
    counted = []
    for key in keys:
        counted.append((key, seen[key]))
        seen[key] += 1
    return counted


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
    by_stem = [_numbers(names) for names in lists]

    def renumbered(part: str, numbers: dict[str, dict[str, int]]) -> str:
        stem = _stem(part)
        if len({frozenset(other.get(stem, ())) for other in by_stem}) == 1:
            return part
        return f"{stem}#{numbers[stem][part]}"

    return [
        ["/".join(renumbered(p, numbers) for p in n.split("/")) for n in names]
        for names, numbers in zip(lists, by_stem)
    ]


def _numbers(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Counts, by stem and part of a name, names of the stem before it."""
    numbers: dict[str, dict[str, int]] = {}
    for name in names:
        for part in name.split("/"):
            same = numbers.setdefault(_stem(part), {})
            same.setdefault(part, len(same))
    return numbers


def _stem(part: str) -> str:
    numbered = _NUMBERED.fullmatch(part)
    return numbered[1] if numbered else part


def _slots(
    names: Sequence[str], weights: Sequence[str]
) -> list[tuple[int | None, str]]:
    """Returns the index of each slot's weight, or None, and the rest."""
    # The longest first, as one name may begin with another.
    starts = sorted(
        ((f"{w.replace('/', '_')}_", i) for i, w in enumerate(weights)),
        key=lambda start: -len(start[0]),
    )
    slots: list[tuple[int | None, str]] = []
    for name in names:
        rest = name.partition("/")[2] or name
        for start, i in starts:
            if rest.startswith(start):
                slots.append((i, rest[len(start) :]))
                break
        else:
            slots.append((None, rest))
    return slots
