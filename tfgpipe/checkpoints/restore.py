"""Goes on from a checkpoint."""

from __future__ import annotations

import os
import pathlib
import warnings
import weakref
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.checkpoints import folder as manifest_lib
from tfgpipe.checkpoints import writer
from tfgpipe.checkpoints.folder import Damaged, Folder, Manifest
from tfgpipe.checkpoints.writer import VALUES, wait_for_all
from tfgpipe.checks import as_integer

# With how many steps the optimizer counted then, and which were damaged.
_restored: weakref.WeakKeyDictionary[keras.Model, Any] = (
    weakref.WeakKeyDictionary()
)


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
        model: A `GPipe`, or a plain Keras model, of the layers that were saved,
            in their order. Built; compiled with the same optimizer, or not
            compiled: then the optimizer's state is left out.
        folder: That of the callback.
        step: Of which step; None for the last one. One that is damaged is left
            as it is, with a warning, and the one before it taken.

    Returns:
        From where to go on; None if there is no checkpoint, and the model is as
        it was.

    Raises:
        ValueError: If an argument is of the wrong kind, `step` is not there or
            is damaged, all checkpoints are damaged, or they are of another
            model.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a `tfgpipe.GPipe` or another `keras.Model`. "
            f"Received: model={model!r}."
        )
    wait_for_all()
    found = Folder(folder)
    steps = found.steps()
    if step is not None and as_integer(step) not in steps:
        raise ValueError(
            "`step` must be that of a checkpoint. Received: "
            f"step={step!r}, and folder={str(folder)!r} with steps {steps}."
        )
    damaged: dict[int, str] = {}
    for one in reversed(steps) if step is None else [int(step)]:
        path = found.of(one)
        try:
            manifest = manifest_lib.read_manifest(path)
            manifest_lib.check_files(path, manifest)
            _take(model, path, manifest)
        except Damaged as error:
            damaged[one] = f"{path}: {error}."
            continue
        if damaged:
            warnings.warn(
                "A checkpoint must be as it was written. Received: "
                f"{' '.join(damaged.values())} Left as it is; {path} was "
                "taken.",
                stacklevel=2,
            )
        restored = Restored(str(path), *manifest.position)
        _restored[model] = restored, steps_of(model), set(damaged)
        return restored
    if damaged:
        raise ValueError(
            "A checkpoint must be as it was written. Received: "
            f"{' '.join(damaged.values())} None is left to go on from: train "
            "anew, in another folder, or bring back a copy."
        )
    return None


def steps_of(model: keras.Model) -> int:
    """How many mini-batches a model counts, skipped ones too.

    A `LossScaleOptimizer` does not count those that overflowed.
    """
    optimizer = getattr(model, "optimizer", None)
    updates = 0 if optimizer is None else internals.raw_iterations(optimizer)
    return updates + getattr(model, "num_skipped", 0)


def known_steps_of(model: keras.Model) -> int:
    """As `steps_of`; after `restore`, counted from what it has returned."""
    steps = steps_of(model)
    restored, before, _ = _restored.get(model, (None, 0, set()))
    return steps if restored is None else restored.step + steps - before


def is_known_damaged(model: keras.Model, step: int) -> bool:
    """Whether `restore` found the checkpoint of a step damaged."""
    *_, damaged = _restored.get(model, (None, 0, set()))
    return step in damaged


def _take(model: keras.Model, path: pathlib.Path, manifest: Manifest) -> None:
    """Assigns all values of a checkpoint that was found to be whole."""
    if not model.built:
        raise ValueError(
            "`model` must be built, to have variables. Received: "
            f"'{model.name}', which is not. Call `model.build(input_shape)` "
            "first, or let the list of layers begin with `keras.Input(shape)`."
        )
    _build_optimizer(model)
    groups = writer.contents(model)
    if not groups["optimizer"]:  # not compiled
        del groups["optimizer"]
    if not (groups["skipped"] and manifest.variables.get("skipped")):
        del groups["skipped"]  # one of them does not skip
    names = internals.optimizer_names(model)
    if names and names != list(manifest.optimizer):
        raise ValueError(
            "`model` must have an optimizer like that of the training. "
            f"Received: {names}, and {list(manifest.optimizer)} in {path}. "
            "Compile the model as it was for the training."
        )
    _check(writer.variable_records(groups), manifest, path)
    for group, variables in groups.items():
        for i, variable in enumerate(map(writer.storage, variables)):
            key = writer.key(group, i)
            variable.assign(_read(path, key, variable))


def _read(path: pathlib.Path, key: str, variable: tf.Variable) -> tf.Tensor:
    """A value, on this host: others may not have the folder."""
    with tf.device("CPU:0"):
        try:
            [value] = tf.raw_ops.RestoreV2(
                prefix=str(path / VALUES),
                tensor_names=[key],
                shape_and_slices=[""],
                dtypes=[variable.dtype],
            )
        except tf.errors.OpError as error:
            raise Damaged(f"{key} cannot be read: {error.message}") from error
        return value


def _build_optimizer(model: Any) -> None:
    if hasattr(model, "build_optimizer"):
        model.build_optimizer()
        return
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _check(
    expected: dict[str, list[list[Any]]], manifest: Manifest, path: pathlib.Path
) -> None:
    """Compares the variables of a model with those of a checkpoint."""
    for group, own in expected.items():
        saved = manifest.variables.get(group, [])
        what = {"model": "layers", "optimizer": "an optimizer"}.get(group)
        if len(own) != len(saved):
            raise ValueError(
                f"`model` must have {what} like those that were saved. "
                f"Received: {len(own)} variables of the {group}, and "
                f"{len(saved)} in {path}. Make, and compile, the model as it "
                "was for the training."
            )
        for (name, *kind), (saved_name, *saved_kind) in zip(own, saved):
            if kind != saved_kind:
                raise ValueError(
                    f"`model` must have {what} like those that were saved. "
                    f"Received: '{name}' of shape and dtype {kind}, where "
                    f"{path} has '{saved_name}' of {saved_kind}. Make, and "
                    "compile, the model as it was for the training."
                )
