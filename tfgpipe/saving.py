"""Saves and loads a `GPipe`, at the same or another number of cells.

Files are Keras's own and hold nothing about cells but the arguments: what was
saved with four cells can be loaded with two.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import tree

_overrides: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar(
    "overrides", default={}
)


def load_model(
    path: str,
    num_partitions: int | None = None,
    num_micro_batches: int | None = None,
    devices: Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Loads what `model.save("model.keras")` wrote.

    Args:
        path: The `.keras` file.
        num_partitions: K. Defaults to what was saved.
        num_micro_batches: M. Defaults to what was saved.
        devices: Names of the devices. Defaults to what was saved; where no
            names were given then, to the first K accelerators.
        **kwargs: Other arguments of `keras.saving.load_model`:
            `custom_objects`, `compile`, `safe_mode`.

    Returns:
        The `tfgpipe.GPipe`, compiled as it was, optimizer state included.
    """
    changes = {
        "num_partitions": num_partitions,
        "num_micro_batches": num_micro_batches,
        "devices": None if devices is None else list(devices),
    }
    with _overriding({k: v for k, v in changes.items() if v is not None}):
        return keras.saving.load_model(path, **kwargs)


@contextlib.contextmanager
def _overriding(changes: dict[str, Any]) -> Iterator[None]:
    token = _overrides.set(changes)
    try:
        yield
    finally:
        _overrides.reset(token)


def overridden(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with the arguments of `load_model`.

    At another number of cells the saved cut and device names are dropped.
    """
    changes = _overrides.get()
    if changes.get("num_partitions", config["num_partitions"]) != (
        config["num_partitions"]
    ):
        config = {**config, "layers_per_cell": None, "devices": None}
    return {**config, **changes}


def spec_config(spec: Any) -> dict[str, Any]:
    """A nest of `keras.KerasTensor`s as plain values."""
    flat = tree.flatten(spec)
    return {
        "structure": tree.pack_sequence_as(spec, list(range(len(flat)))),
        "specs": [
            None if s is None else [list(s.shape), s.dtype] for s in flat
        ],
    }


def spec_from_config(config: dict[str, Any]) -> Any:
    """Undoes `spec_config`."""
    flat = [
        None if s is None else keras.KerasTensor(tuple(s[0]), s[1])
        for s in config["specs"]
    ]
    return tree.map_structure(lambda i: flat[i], config["structure"])


class RandomState(keras.layers.Layer):
    """Saves the states of seed generators, which Keras does not.

    Without them a resumed run would draw the dropout masks of its first steps
    again.
    """

    def __init__(self, seeds: list[keras.Variable]):
        super().__init__(name="random_state")
        self._seeds = lambda: seeds  # not tracked: the layers own them
        self.built = True

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras to save."""
        for i, seed in enumerate(self._seeds()):
            store[str(i)] = seed.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras to load; plain Keras files have no seeds."""
        if len(store.keys()) == len(self._seeds()):
            for i, seed in enumerate(self._seeds()):
                seed.assign(store[str(i)])
