"""Saves and loads a `GPipe`, at the same or another number of cells.

Files are Keras's own and hold nothing about cells but the arguments: what was
saved with four cells can be loaded with two.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import keras
import tensorflow as tf
from keras import tree

from tfgpipe import failures, internals
from tfgpipe.arguments import DEFAULTS
from tfgpipe.checks import as_count, checked_bool, checked_path
from tfgpipe.devices import placement
from tfgpipe.devices import strategy as strategy_lib
from tfgpipe.files import read_whole, written_whole
from tfgpipe.internals import Nest
from tfgpipe.model.hooks import Hooks
from tfgpipe.model.nonfinite import Skips
from tfgpipe.schedules import CHUNKS
from tfgpipe.sequence import items_from_config
from tfgpipe.state import RandomState

_NONE_IS_A_VALUE = {"gradient_dtype", "skip_outliers"}

_overrides: contextvars.ContextVar[dict[str, Any] | None] = (
    contextvars.ContextVar("overrides", default=None)
)


def load_model(
    path: str | os.PathLike[str],
    num_partitions: int | None = None,
    num_micro_batches: int | None = None,
    devices: Sequence[Any] | None = None,
    **changes: Any,
) -> Any:
    """Loads what `model.save("model.keras")` wrote.

    Args:
        path: The `.keras` file; or the folder, if it was saved with
            `zipped=False`.
        num_partitions: K. Defaults to what was saved, or to that of the
            `PipelineStrategy` in whose scope this is called.
        num_micro_batches: M. Defaults to what was saved.
        devices: The devices, as for `GPipe`. Defaults to what was saved; where
            none were given then, to the first accelerators.
        **changes: Other arguments of `GPipe`, such as `remat`, where they are
            to be others than were saved: at another K, a saved
            `layers_per_cell` is left out. None stands for what was saved, but
            for `gradient_dtype` and `skip_outliers`, of which it is a value.
            And arguments of `keras.saving.load_model`: `custom_objects`,
            `compile`, `safe_mode`.

    Returns:
        The `tfgpipe.GPipe`, compiled as it was, optimizer state included.

    Raises:
        ValueError: If the file is damaged or holds something else, or the
            arguments do not fit the layers or the devices.

    Example:

    >>> import tempfile
    >>> import tfgpipe
    >>> layers = [keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4))]
    >>> model = tfgpipe.GPipe(layers, num_partitions=1, num_micro_batches=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(f"{folder}/model.keras")
    ...     loaded = load_model(f"{folder}/model.keras", num_micro_batches=8)
    >>> loaded.num_micro_batches
    8
    """
    checked_path("path", path)
    path = os.fspath(path)
    of_keras = {k: changes.pop(k) for k in [*changes] if k not in DEFAULTS}
    changes |= {
        "num_partitions": num_partitions,
        "num_micro_batches": num_micro_batches,
        "devices": None if devices is None else [*devices],
    }
    if changes.get("skip_nonfinite") is False:
        changes.setdefault("skip_outliers", None)
    for name in [*changes]:
        if changes[name] is None and name not in _NONE_IS_A_VALUE:
            del changes[name]
    with failures.setting(_overrides, changes), read_whole(path):
        model = keras.saving.load_model(path, **of_keras)
    if not isinstance(model, Saving):
        raise ValueError(
            f"`path` must hold a `tfgpipe.GPipe`. Received: path={path!r}, of "
            f"a {type(model).__name__}. Use `keras.saving.load_model`."
        )
    return model


def overridden(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with the arguments of `load_model`.

    At another number of cells the saved cut and device names are dropped.
    """
    changes = _overrides.get() or {}
    changes = {**_of_strategy({**config, **changes}), **changes}
    new = {**config, **changes}
    if as_count(new["num_partitions"]) != config["num_partitions"]:
        new = {**new, "layers_per_cell": None, "devices": None, **changes}
    return new


def _of_strategy(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments that follow from the strategy in whose scope this is called."""
    strategy, saved = strategy_lib.current(), as_count(config["num_partitions"])
    if strategy is None or saved is None:  # the latter is refused later
        return {}
    k, schedule = strategy.num_partitions, config["schedule"]
    chunks: int | None = 1
    if isinstance(schedule, (list, tuple)):  # the tasks of each device
        keeps = len(schedule) == k
    else:
        chunks = CHUNKS.get(schedule, 1)  # a wrong name is refused later
        keeps = chunks is None and saved % k == 0
    return {
        "num_partitions": saved if keeps else (chunks or 1) * k,
        "devices": None,
    }


def spec_config(spec: Nest) -> dict[str, Any]:
    """A nest of `keras.KerasTensor`s as plain values."""
    flat = tree.flatten(spec)
    return {
        "structure": tree.pack_sequence_as(spec, list(range(len(flat)))),
        "specs": [
            None if s is None else [list(s.shape), s.dtype] for s in flat
        ],
    }


def spec_from_config(config: dict[str, Any]) -> Any:
    """The specs that `spec_config` made plain values of."""
    flat = [
        None if s is None else keras.KerasTensor(tuple(s[0]), s[1])
        for s in config["specs"]
    ]
    return tree.map_structure(lambda i: flat[i], config["structure"])


class Saving(Hooks):
    """The part of `GPipe` that Keras calls to save, load and copy it."""

    def save(
        self,
        filepath: Any,
        overwrite: bool = True,
        zipped: bool | None = None,
        **kwargs: object,
    ) -> None:
        """Writes a `.keras` file, see `keras.Model.save`.

        Raises:
            ValueError: If the file is of the older HDF5 format, which has no
                place for a `GPipe`.
            OSError: If it cannot be written. What was there is kept.
        """
        if str(filepath).endswith((".h5", ".hdf5")):
            raise ValueError(
                f"`filepath` must end in '.keras'. Received: {filepath!r}."
            )
        with written_whole(filepath, overwrite) as path:
            super().save(path, overwrite, zipped, **kwargs)

    def save_weights(
        self,
        filepath: Any,
        overwrite: bool = True,
        max_shard_size: float | None = None,
    ) -> None:
        """Writes a `.weights.h5` file, see `keras.Model.save_weights`.

        Raises:
            OSError: If it cannot be written. What was there is kept.
        """
        if max_shard_size is not None:  # several files, left to Keras
            super().save_weights(filepath, overwrite, max_shard_size)
            return
        with written_whole(filepath, overwrite) as path:
            super().save_weights(path, overwrite)

    def load_weights(
        self, filepath: Any, *args: object, **kwargs: object
    ) -> None:
        """Loads what `save_weights` wrote, see `keras.Model.load_weights`.

        The optimizer's state is loaded even if it has made no step yet.

        Raises:
            ValueError: If the file is damaged, or another model's.
        """
        with read_whole(filepath):
            optimizer = self.optimizer_to_be() if self.built else None
            if optimizer is not None and str(filepath).endswith(".weights.h5"):
                with h5py.File(filepath) as file:
                    num_variables = len(file.get("optimizer/vars", ()))
                # More than its own: the slots of one that has made steps.
                if num_variables > len(getattr(optimizer, "variables", ())):
                    self.compile_as_task()
                    self.build_optimizer()
            with internals.assigning_by(placement.assign_in_pieces):
                super().load_weights(filepath, *args, **kwargs)

    @property
    def random_state(self) -> RandomState | None:
        """The random seeds, which Keras itself does not save."""
        return None if self._built is None else self._built.random_state

    @property
    def held_random_state(self) -> RandomState | None:
        """The seeds of what the model holds beside its layers, if any."""
        built, notes = self._built, self._notes
        if built is None:
            return None

        def held() -> list[keras.Variable]:
            others = [v for cell in built.cells for v in cell.seeds]
            others += [*self.weights, *self.metrics_variables]
            known = {id(v) for v in others}
            return [v for v in self.variables if id(v) not in known]

        if notes.held_random_state is None:
            notes.held_random_state = RandomState(held)
        return notes.held_random_state if held() else None

    @property
    def skips(self) -> Skips | None:
        """The number of mini-batches that were skipped, for files."""
        return self._notes.skips

    def get_config(self) -> dict[str, Any]:
        """The arguments; costs as numbers, if they are known."""
        if self._built is not None:
            costs: list[Any] = self._source.by_call(self._built.costs)
        else:
            costs = [None if callable(c) else c for c in self._source.costs]
        return {
            **super().get_config(),
            **self._source.config(),
            "costs": costs,
            "cost_unit": self._arguments.costs.unit,
            "build_config": self.get_build_config(),
            **self._arguments.config(),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> Any:
        """Makes a model of what `get_config` returned."""
        config = overridden(dict(config))
        build_config = config.pop("build_config", None)
        unit = config.pop("cost_unit", None)
        is_later = unit == "bytes" and None in config["costs"]  # not built
        items = items_from_config(config, custom_objects)
        if is_later:
            config["costs"] = unit
        make: Any = cls  # a `GPipe`, or one of its subclasses
        model = make(items, **config)
        if unit is not None:
            model._arguments.costs.unit = unit
        model.build_from_config(build_config)
        return model

    def export(
        self,
        filepath: Any,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        devices: bool = False,
        **kwargs: object,
    ) -> None:
        """Writes a model for serving, see `keras.Model.export`.

        The pipeline stays behind: what is served runs layer by layer.

        Args:
            filepath: The folder.
            format: Of the model.
            verbose: Whether to say what was written.
            input_signature: What the model is served. Defaults to its inputs.
            devices: Whether the weights are loaded onto devices of the same
                names, and each layer computes where its weights are: for a
                model that no single device holds. Else all of it is loaded
                onto the first device.
            **kwargs: Other arguments.

        Raises:
            ValueError: If the format has no place for devices.
        """
        if checked_bool("devices", devices) and format != "tf_saved_model":
            raise ValueError(
                "`devices=True` needs format='tf_saved_model'. Received: "
                f"format={format!r}."
            )
        if input_signature is None and self._built is not None:
            spec = self._built.input_spec
            if self._source.input_spec is None and not tree.is_nested(spec):
                # As `keras.Sequential`, whatever data it was built for.
                spec = keras.KerasTensor(
                    spec.shape, self.input_dtype, name=spec.name
                )
            input_signature = [spec]
        with _with_devices() if devices else placement.homes_left():
            super().export(filepath, format, verbose, input_signature, **kwargs)

    def get_build_config(self) -> dict[str, Any] | None:
        """Shapes and dtypes of the inputs."""
        built = self._built
        return None if built is None else spec_config(built.input_spec)

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds for what `get_build_config` returned."""
        if config is not None and not self.built:
            self.build_for_spec(spec_from_config(config))


@contextlib.contextmanager
def _with_devices() -> Iterator[None]:
    """Inside, Keras has variables of a `SavedModel` keep their devices."""
    options = tf.saved_model.SaveOptions(
        experimental_variable_policy="save_variable_devices"
    )
    cls = type(keras.export.ExportArchive())  # it makes one of another class
    write_out = internals.Replaceable(cls, "write_out")

    def write(archive: Any, path: Any, *args: object, **kwargs: object) -> None:
        write_out.original(archive, path, options, *args, **kwargs)

    with write_out.by(write):
        yield
