"""`plot_cells`: the cells of a model, as a picture."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfgpipe.checks import checked_path

if TYPE_CHECKING:
    from tfgpipe.monitor.drawing import Picture

_SUFFIXES = (".png", ".svg")

_MOST_NAMES = 2  # of the devices of a cell


def plot_cells(
    model: Any, to_file: str | os.PathLike[str] = "cells.png"
) -> None:
    """Draws the cells of a model into a file.

    A row is a cell, with its devices. A box in it is a call of a layer, as wide
    as its share of the cost, and has its name if there is room; colours are
    classes of layers. At the end of a row are the cell's share of the cost and
    the size of its weights. So the longest row is the slowest cell, for which
    the others wait; a dashed line marks the mean.

    Equal models give equal files, with the same version of matplotlib, which
    is needed. `keras.utils.plot_model(model)` draws the layers and what they
    are connected to.

    Args:
        model: A `GPipe` that is built.
        to_file: The file to write, whose name ends with ".png" or ".svg".

    Raises:
        ValueError: If the model is no `GPipe` or not built, or the file has
            another ending.
        OSError: If the file cannot be written.
        ImportError: If matplotlib is not installed.

    Example:

    >>> import keras, tempfile, tfgpipe
    >>> layers = [keras.layers.Dense(8, "relu") for _ in range(4)]
    >>> model = tfgpipe.GPipe([keras.Input((8,)), *layers], 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tfgpipe.plot_cells(model, f"{folder}/cells.svg")
    """
    if not hasattr(model, "built_for"):
        raise ValueError(
            "`model` must be a `tfgpipe.GPipe`, which has cells. Received: "
            f"model={getattr(model, 'name', model)!r}, a "
            f"{type(model).__name__}. Pass `tfgpipe.GPipe(layers)`, or draw it "
            "by `keras.utils.plot_model`."
        )
    path = checked_path("to_file", to_file)
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"`to_file` must end with {' or '.join(_SUFFIXES)}. Received: "
            f"to_file={str(to_file)!r}."
        )
    model.built_for("plot_cells(model)")
    if not importlib.util.find_spec("matplotlib"):
        raise ImportError(
            "`tfgpipe.plot_cells` needs matplotlib, which is not installed. "
            f"Received: to_file={str(to_file)!r}. Install it with `pip install "
            "matplotlib`; `model.summary()` prints the cells without it."
        )
    picture_of_cells(model).save(path)


def picture_of_cells(model: Any) -> Picture:
    """Returns the picture of the cells of a `GPipe` that is built."""
    from tfgpipe.monitor import drawing  # needs matplotlib

    built, cells = model.built_for("plot_cells(model)"), model.cells()
    total = sum(cell.cost for cell in cells)
    steps = [step for cell in built.cells for step in cell.steps]
    # Those that cost nothing are all as wide.
    calls = iter(
        drawing.Call(
            _names(step, built.source.model),
            _kind(step),
            cost / total if total else 1 / len(steps),
        )
        for step, cost in zip(steps, built.costs)
    )
    rows = {
        f"cell {cell.index}\n{_devices(cell.devices)}": (
            [next(calls) for _ in cell.layers],
            _mib(cell.weight_bytes),
        )
        for cell in cells
    }
    unit = f" {cells[0].unit}" if cells[0].unit else ""
    slowest = max(cells, key=lambda cell: cell.cost)
    subtitle = (
        f"{len(steps):,} calls, which cost {total:.3g}{unit}; "
        f"{_mib(sum(cell.weight_bytes for cell in cells))} of weights"
    )
    if total and len(cells) > 1:
        ratio = slowest.cost * len(cells) / total
        subtitle += f"; cell {slowest.index} costs {ratio:.2f} times the mean"
    title = f"{model.name}: K = {len(cells)}"
    return drawing.cells_picture(rows, title, subtitle)


def _names(step: Any, model: Any) -> list[str]:
    """Returns the layer's name, with ever fewer of the layers around it."""
    around = [layer.name for layer in step.section.around if layer is not model]
    names = ["/".join(around[i:]) for i in range(len(around))]
    return names or [step.layer.name]


def _kind(step: Any) -> str:
    """Returns the class of what is called; legends leave out a leading _."""
    called = step.section.operation
    return "no call" if called is None else type(called).__name__.lstrip("_")


def _devices(names: Sequence[str]) -> str:
    """Returns the devices of a cell, one a replica, in words."""
    texts = []
    for name in names[:_MOST_NAMES]:
        spec = tf.DeviceSpec.from_string(name)
        is_here = spec.job in (None, "localhost")
        host = "" if is_here else f"{spec.job} {spec.task or 0} "
        texts.append(f"{host}{spec.device_type}:{spec.device_index}")
    more = len(names) - _MOST_NAMES
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _mib(num_bytes: int) -> str:
    """Returns a size as a text.

    Example:

    >>> _mib(0), _mib(300_000), _mib(300_000_000)
    ('0 MiB', '0.286 MiB', '286 MiB')
    """
    return f"{num_bytes / 2**20:.3g} MiB"
