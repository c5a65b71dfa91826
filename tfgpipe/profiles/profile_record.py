"""Measured tasks of layers: a record, a file and a table.

A record, in plain Python, which a file can hold: see `profiler.py` for how
it is made.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfgpipe.checks import checked_counts
from tfgpipe.files import write_text

MEASURED = (
    "forward",
    "recompute",
    "recompute_last",
    "backward",
    "input_gradient",
    "weight_gradient",
    "backward_first",
)

# A share of what is measured between the quartiles that an idle computer has.
MOST_SPREAD = 0.25

_SHORT = 1e-4  # seconds; below, a clock and a call are no exact measure


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds that were measured again and again.

    What else runs on a computer makes tasks slower and never faster. So the
    lower quartile is taken for what a task takes, and the upper one tells how
    busy the computer was.

    Attributes:
        median: Half of them were less.
        low: A quarter of them were less.
        high: A quarter of them were more.
    """

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class TaskSeconds:
    """The tasks of a layer for a micro-batch, each with the cost of a call.

    None where there is no such task: nothing to train, or nothing to recompute.
    Of a layer before which there are no weights, or if XLA compiles, the
    backward pass has no halves.

    Attributes:
        rows: Of the micro-batch.
        output_bytes: Bytes of what the layer hands on.
        kept_bytes: Bytes of what its backward pass keeps of its forward pass.
        forward: Computes the outputs.
        recompute: Computes again what the backward pass needs, and the outputs
            for the layer behind it.
        recompute_last: The same without those outputs, as the last layer of a
            cell does.
        backward: Computes the gradients of inputs and weights, and adds up
            those of weights.
        input_gradient: The first half of that: what the layer before needs.
        weight_gradient: The second half. Both may take longer than the whole.
        backward_first: The same as `backward` for the first micro-batch of a
            step, which has no sums to add to.
    """

    rows: int
    output_bytes: int
    kept_bytes: int
    forward: Spread
    recompute: Spread | None
    recompute_last: Spread | None
    backward: Spread | None
    input_gradient: Spread | None
    weight_gradient: Spread | None
    backward_first: Spread | None = None


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """The record of a layer.

    Attributes:
        name: Of the layer.
        key: A text that layers share which compute the same, with weights of
            the same shapes.
        num_params: Numbers in its trainable weights; of tied weights, the
            first layer has all.
        weight_bytes: Bytes of all its weights.
        slot_bytes: Bytes that the optimizer keeps for them.
        gradient_bytes: Bytes of a gradient for each trainable weight.
        measured: Its tasks, for the numbers of rows in rising order.
    """

    name: str
    key: str
    num_params: int
    weight_bytes: int
    slot_bytes: int
    gradient_bytes: int
    measured: tuple[TaskSeconds, ...]


def _layer(measured: list[dict[str, Any]], **facts: Any) -> LayerProfile:
    """Returns a record of plain values, as `dataclasses.asdict` makes them."""
    tasks: list[dict[str, Any]] = [
        {k: Spread(**v) if isinstance(v, dict) else v for k, v in own.items()}
        for own in measured
    ]
    made = tuple(TaskSeconds(**own) for own in tasks)
    return LayerProfile(measured=made, **facts)


_FORMAT = "tfgpipe.profile 2"


@dataclasses.dataclass(frozen=True)
class Profile:
    """The measurements of `tfgpipe.profile`. It is printed as a table.

    Attributes:
        layers: The layers, in order.
        loss: The loss, which is computed behind the last layer; or None.
        device: Where it was measured.
        call_seconds: What a task takes beside what it computes.
        jit_compile: Whether XLA compiled the tasks.
        optimizer: The class whose slots are counted.
        versions: Of packages, by their names.

    Example:

    >>> import keras, pathlib, tempfile
    >>> import numpy as np
    >>> import tfgpipe
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4, name="dense")]
    >>> record = tfgpipe.profile(
    ...     layers, np.ones((16, 8)), seconds=0.1, verbose=0
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "profile.json")
    ...     record.save(path)
    ...     [layer.name for layer in Profile.load(path).layers]
    ['dense']
    """

    layers: tuple[LayerProfile, ...]
    loss: LayerProfile | None
    device: str
    call_seconds: float
    jit_compile: bool
    optimizer: str
    versions: dict[str, str]

    @property
    def spread(self) -> float:
        """How far repeated measurements lie apart, quartile to quartile.

        As a share of what they measure; of tasks of 0.1 ms or more.
        """
        spreads = [
            getattr(tasks, kind)
            for layer in self.layers
            for tasks in layer.measured
            for kind in MEASURED
        ]
        known = [s for s in spreads if s is not None and s.low > _SHORT]
        width = sum(s.high - s.low for s in known)
        return width / sum(s.low for s in known) if known else 0.0

    def warn_if_spread(self) -> None:
        """Warns of a profile that a busy computer has made."""
        if self.spread > MOST_SPREAD:
            warnings.warn(
                "Repeated measurements of a task must agree. Received: a "
                f"profile whose measurements spread by {self.spread:.0%} "
                f"(quartile to quartile; at most {MOST_SPREAD:.0%} on an idle "
                "computer). Measure again when nothing else runs on the "
                "device, or for longer: `tfgpipe.profile(..., seconds=...)`.",
                stacklevel=3,
            )

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes of micro-batches that were measured, rising."""
        return tuple(tasks.rows for tasks in self.layers[0].measured)

    def seconds(self, index: int, kind: str, rows: float) -> float:
        """Returns the seconds of a layer's task, without the cost of a call.

        Between the sizes that were measured, and above them, it is on a line.
        Below, the smallest one counts: a task has a cost that rows do not
        tell, so that nothing is promised which was not measured.

        Args:
            index: Of the layer. The last one's has the loss in it.
            kind: "forward", "recompute", "backward"; or one of its halves,
                "input_gradient" or "weight_gradient"; where it has no halves,
                all is in the second. Or "recompute_last", without outputs but
                those that the loss takes; or "backward_first", which has no
                sums to add gradients to.
            rows: Of the micro-batch.
        """
        of_layers = [(self.layers[index], kind)]
        if index == len(self.layers) - 1:
            if kind == "recompute_last":
                # The loss behind it takes its outputs, measured or not.
                of_layers = [(self.layers[index], "recompute")]
            if self.loss is not None:
                of_layers.append((self.loss, kind))
        seconds = sum(self._of(*pair, rows) for pair in of_layers)
        if kind == "backward_first":
            return min(seconds, self.seconds(index, "backward", rows))
        return seconds

    def layer_seconds(self, rows: float) -> list[dict[str, float]]:
        """Returns the seconds of all layers' tasks, without a call's cost.

        A layer whose tasks cannot be cut, as compiled loops, has no
        "input_gradient": what it needs is recomputed within the backward task.
        """
        by_layer = []
        for i, layer in enumerate(self.layers):
            of = {kind: self.seconds(i, kind, rows) for kind in MEASURED}
            if any(t.backward and not t.recompute for t in layer.measured):
                del of["input_gradient"]
            by_layer.append(of)
        return by_layer

    def cell_seconds(self, rows: float) -> CellSeconds:
        """Returns the seconds of the tasks of cells, for so many rows."""
        are_trained = (layer.num_params > 0 for layer in self.layers)
        return CellSeconds(
            self.layer_seconds(rows), are_trained, self.call_seconds
        )

    def task_seconds(
        self, start: int, stop: int, kind: str, rows: float
    ) -> float:
        """Returns the seconds of a task of a cell.

        Args:
            start: Index of its first layer.
            stop: Index behind its last one.
            kind: As for `seconds`.
            rows: Of the micro-batch.

        Returns:
            The cost of a call and the seconds of its layers; 0.0 if it has
            nothing to compute.
        """
        return self.cell_seconds(rows).of_cell(start, stop)[kind]

    def costs(self, rows: int | None = None) -> list[float]:
        """Adds up the seconds of all tasks of each layer for a micro-batch.

        Args:
            rows: Of the micro-batch. Defaults to the most that were measured.
        """
        rows = self._checked_rows(rows)
        return [
            sum(
                self.seconds(i, kind, rows)
                for kind in ("forward", "recompute", "backward")
            )
            for i in range(len(self.layers))
        ]

    def bytes(self, rows: int | None = None) -> list[float]:
        """Adds up each layer's weights, slots, gradients, and what is kept.

        Args:
            rows: Of the micro-batch, of which the backward pass keeps what it
                needs. Defaults to the most that were measured.
        """
        rows = self._checked_rows(rows)
        return [
            layer.weight_bytes
            + layer.slot_bytes
            + layer.gradient_bytes
            + _on_line([(o.rows, o.kept_bytes) for o in layer.measured], rows)
            for layer in self.layers
        ]

    def _checked_rows(self, rows: int | None) -> int:
        """Returns rows of a micro-batch; the most measured for None."""
        (count,) = checked_counts(rows=self.rows[-1] if rows is None else rows)
        return count

    def _of(self, layer: LayerProfile, kind: str, rows: float) -> float:
        points = []
        for tasks in layer.measured:
            spread = getattr(tasks, kind)
            is_whole = tasks.input_gradient is None
            if (kind == "weight_gradient" and is_whole) or (
                kind == "backward_first" and spread is None
            ):
                spread = tasks.backward
            if spread is None:
                return 0.0
            seconds = max(0.0, spread.low - self.call_seconds)
            points.append((tasks.rows, seconds))
        return _on_line(points, max(rows, points[0][0]))

    def check(self, names: Sequence[str], keys: Sequence[str]) -> None:
        """Refuses to be used for other layers.

        Args:
            names: Of the layers.
            keys: As `Placed` has them.

        Raises:
            ValueError: If the layers are not those that were measured.
        """
        expected = [layer.key for layer in self.layers]
        pairs = enumerate(zip(expected, keys))
        differs = next((i for i, (a, b) in pairs if a != b), None)
        told = f"one of {len(expected)} layers, for {len(keys)} layers"
        if differs is not None:
            told = (
                f"one whose layer {differs}, '{self.layers[differs].name}', "
                "has another computation or shape of weights than layer "
                f"'{names[differs]}' of the model"
            )
        if differs is not None or len(expected) != len(keys):
            raise ValueError(
                "A profile must be one of the model's layers. Received: "
                f"{told}. Measure these: `tfgpipe.profile(layers, x)`."
            )

    def __str__(self) -> str:
        """Returns the table: a line for each layer and its rows.

        Seconds are lower quartiles, each with the cost of a call; `+-` is half
        of the distance of the quartiles, of all kinds the largest, as a share.
        """
        titles = "layer rows forward recompute backward +- outputs kept weights"
        rows = [f"{titles} slots gradients".split()]
        for layer in [*self.layers, *filter(None, [self.loss])]:
            held = layer.weight_bytes, layer.slot_bytes, layer.gradient_bytes
            for tasks in layer.measured:
                spreads = tasks.forward, tasks.recompute, tasks.backward
                times = ["-" if s is None else _seconds(s.low) for s in spreads]
                widths = [
                    (spread.high - spread.low) / 2 / spread.low
                    for spread in spreads
                    if spread is not None and spread.low
                ]
                sizes = tasks.output_bytes, tasks.kept_bytes, *held
                rows.append(
                    [
                        layer.name,
                        str(tasks.rows),
                        *times,
                        f"{max(widths, default=0.0):.0%}",
                        *map(size_text, sizes),
                    ]
                )
        compiled = ", compiled by XLA" if self.jit_compile else ""
        end = (
            f"On {self.device}{compiled}; slots of {self.optimizer}; a call "
            f"takes {_seconds(self.call_seconds)} of each."
        )
        return "\n".join([*aligned(rows), end])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON, whole or not at all.

        Args:
            path: Of the file.
        """
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})
        write_text(os.fspath(path), text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads what `save` wrote.

        Args:
            path: Of the file.

        Raises:
            ValueError: If the file holds something else.
        """
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            values = json.loads(text)
            if values.pop("format", None) != _FORMAT:
                raise ValueError(f'it has no "format": "{_FORMAT}"')
            values["layers"] = tuple(_layer(**one) for one in values["layers"])
            if values["loss"] is not None:
                values["loss"] = _layer(**values["loss"])
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                "`path` must be the path of a profile, as `Profile.save` "
                f"writes it. Received: {os.fspath(path)!r}, and this "
                f"{type(error).__name__}: {error}. Measure again, and save."
            ) from error


def _on_line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the value on lines through points; through zero, of one point."""
    points = [(0.0, 0.0), *points] if len(points) == 1 else points
    i = sum(x <= at for x, _ in points[1:-1])
    (a, first), (b, second) = points[i : i + 2]
    return max(0.0, first + (second - first) * (at - a) / (b - a))


def aligned(
    rows: Iterable[Sequence[str]], are_left: Collection[int] = (0,)
) -> list[str]:
    """Returns lines of columns, of which some are aligned to the left."""
    columns = [
        [t.ljust(n) if i in are_left else t.rjust(n) for t in column]
        for i, column in enumerate(zip(*rows))
        for n in [max(map(len, column))]
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns)]


def _seconds(value: float) -> str:
    return f"{1e3 * value:,.3f} ms"


def size_text(value: float) -> str:
    """Returns bytes as a text, in a unit that suits them."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:.3g} {unit}"
    return f"{value:.0f} B"


# ------------------------------------------------------ from layers to cells
class CellSeconds:
    """Seconds of the tasks of layers i to j.

    `schedule="auto"`, `Profile.task_seconds` and the planner ask here, so that
    they cannot differ. A task takes `task_seconds` besides its layers.

    Attributes:
        first: Index of the first layer that is trained.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, float]],
        are_trained: Iterable[bool],
        task_seconds: float,
    ):
        self.first = [*are_trained, True].index(True)
        self._task_seconds = task_seconds
        self._halves = ["input_gradient" in layer for layer in layers]
        # Of each layer, without gradients that nothing asks for.
        self._asked = np.zeros((len(layers), len(MEASURED)))
        for i, layer in enumerate(layers):
            of = dict(layer)
            if i < self.first:
                of = {"forward": of["forward"]}
            elif i == self.first:
                of_inputs = max(0.0, of["backward"] - of["weight_gradient"])
                of["backward"] -= of_inputs
                of["backward_first"] -= of_inputs
                of["input_gradient"] = 0.0
            self._asked[i] = [of.get(kind, 0.0) for kind in MEASURED]

    def of_cell(self, start: int, stop: int) -> dict[str, float]:
        """Returns the seconds of each task of layers `start` to before `stop`.

        0.0 for a task that has nothing to compute.
        """
        layers = self._asked[start:stop]
        by_kind = dict(zip(MEASURED, layers.sum(axis=0).tolist()))
        again, of_last = map(MEASURED.index, ("recompute", "recompute_last"))
        by_kind["recompute"] = float(layers[:-1, again].sum())
        by_kind["recompute"] += float(layers[-1, of_last])
        return {
            kind: seconds + self._task_seconds if seconds else 0.0
            for kind, seconds in by_kind.items()
        }

    def costs(self) -> list[float]:
        """Returns the seconds of each layer's passes, for the cut."""
        passes = [MEASURED.index(kind) for kind in ("forward", "backward")]
        costs: list[float] = self._asked[:, passes].sum(axis=1).tolist()
        return costs

    def has_halves(self, start: int, stop: int) -> bool:
        """Returns whether the backward pass of these layers can be cut."""
        return all(self._halves[start:stop])
