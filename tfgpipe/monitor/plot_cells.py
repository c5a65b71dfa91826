"""`plot_cells`: the cells of a model, as a picture."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from typing import Any

import tensorflow as tf

from tfgpipe.checks import checked_path

_SUFFIXES = (".png", ".svg")

_NAMED = 2  # devices of a cell, if it has more than one


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
        to_file: The file to write, whose name ends with ".png" or ".svg", in a
            folder that there is.

    Raises:
        ValueError: If the model is no `GPipe` or not built, or the file has
            another ending or no folder.
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
    path = _checked(to_file)
    built = model.built_for("plot_cells(model)")
    if not importlib.util.find_spec("matplotlib"):
        raise ImportError(
            "`tfgpipe.plot_cells` needs matplotlib, which is not installed. "
            f"Received: to_file={str(to_file)!r}. Install it with `pip install "
            "matplotlib`; `model.summary()` prints the cells without it."
        )
    from tfgpipe.monitor import cell_bars, picture

    cells = model.cells()
    total = sum(cell.cost for cell in cells)
    # Those that cost nothing are all as wide.
    calls = iter(
        cell_bars.Call(
            _names(step, built.source.model),
            _kind(step),
            cost / total if total else 1 / len(built.costs),
        )
        for step, cost in zip(
            (step for cell in built.cells for step in cell.steps), built.costs
        )
    )
    rows = [
        cell_bars.Row(
            _devices(cell.devices),
            [next(calls) for _ in cell.layers],
            _mib(cell.weight_bytes),
        )
        for cell in cells
    ]
    title = f"{model.name}: {_count(len(cells), 'cell')}"
    subtitle = _subtitle(cells, built.costs)
    picture.save(lambda: cell_bars.figure(rows, title, subtitle), [path])


def _checked(to_file: Any) -> pathlib.Path:
    path = checked_path("to_file", to_file)
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"`to_file` must end with {' or '.join(_SUFFIXES)}. Received: "
            f"to_file={str(to_file)!r}. Call it "
            f"{str(path.with_suffix('.png'))!r}, say."
        )
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise ValueError(
            "`to_file` must be a file in a folder that there is. Received: "
            f"to_file={str(to_file)!r}. Make the folder "
            f"{str(path.absolute().parent)!r} first, or choose another name."
        )
    return path


def _names(step: Any, model: Any) -> list[str]:
    """With the layers around it, but for the model, and with ever fewer."""
    around = [layer.name for layer in step.section.around if layer is not model]
    names = ["/".join(around[i:]) for i in range(len(around))]
    return names or [step.layer.name]


def _kind(step: Any) -> str:
    """The class of what is called; a legend leaves out what begins with _."""
    called = step.section.operation
    return "no call" if called is None else type(called).__name__.lstrip("_")


def _devices(names: tuple[str, ...]) -> str:
    """The devices of a cell, in words: one a replica."""
    more = len(names) - _NAMED
    shown = names if more <= 0 else names[:_NAMED]
    text = ", ".join(map(_short, shown))
    return f"{text} and {more} more" if more > 0 else text


def _short(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    name = f"{spec.device_type}:{spec.device_index}"
    if spec.job in (None, "localhost"):
        return name
    return f"{spec.job} {spec.task or 0}, {name}"


def _subtitle(cells: list[Any], costs: tuple[float, ...]) -> str:
    """The numbers that matter most."""
    total = sum(cell.cost for cell in cells)
    unit = f" {cells[0].unit}" if cells[0].unit else ""
    weights = _mib(sum(cell.weight_bytes for cell in cells))
    text = (
        f"{_count(len(costs), 'call')}, which cost {total:.3g}{unit}; "
        f"{weights} of weights"
    )
    if not total or len(cells) == 1:
        return text
    slowest = max(cells, key=lambda cell: cell.cost)
    ratio = slowest.cost * len(cells) / total
    return f"{text}; cell {slowest.index} costs {ratio:.2f} times the mean"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _mib(num_bytes: int) -> str:
    """A size as a text.

    Example:

    >>> _mib(0), _mib(40), _mib(300_000), _mib(300_000_000)
    ('0 MiB', '< 0.01 MiB', '0.29 MiB', '286 MiB')
    """
    size = num_bytes / 2**20
    if 0 < size < 0.01:
        return "< 0.01 MiB"
    digits = 0 if size >= 100 or not size else 1 if size >= 10 else 2
    return f"{size:,.{digits}f} MiB"
