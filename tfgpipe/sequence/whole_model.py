"""A model with a `call` of its own: its sections are its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe.cells import outline
from tfgpipe.costs import operation_flops
from tfgpipe.partition import cut_graph
from tfgpipe.sequence.layer_list import called_model


class WholeModel:
    """A model that is called as it is.

    Attributes:
        model: The model.
        models: Those that the layers are also used by.
        layers: The model alone: it has all others.
        steps: Its sections, once inputs are known.
        costs: None for each: what the user said of its cost.
        live_bytes: What crosses if a cell begins with a section, for one row.
        input_spec: Nest of `keras.KerasTensor`s that it takes, or None.
        problems: What is wrong.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.models: list[Any] = []
        self.layers = [model]
        self.steps: list[Any] = []
        self.costs: list[Any] = []
        self.live_bytes: list[int] = []
        self.problems: list[str] = []
        self.input_spec: Any = None

    def call(self, x: Any, training: bool) -> Any:
        """Calls the model."""
        return called_model(self.model, x, training)

    def check_again(self) -> None:
        """The model is called as it is."""

    def check(self, spec: Any, num_rows: int | None) -> None:
        """The model is called as it is."""

    def infer(self, spec: Any, is_split: bool) -> tuple[Any, list[float]]:
        """Runs the model on shapes.

        Returns specs of its outputs, and the costs of its sections.
        """
        found = outline(self.call, self.layers, spec, operation_flops)
        self.steps, self.live_bytes = [*found.steps], found.live_bytes
        self.costs = [None] * len(found.steps)
        return found.output, found.flops

    def arranged(self, x: Any) -> Any:
        """Data as the model takes it: as it comes."""
        return x

    def starts(self) -> list[int]:
        """The steps with which a cell can begin."""
        return [*range(len(self.steps))]

    def why_whole(self, layer: keras.layers.Layer) -> str:
        """Why a layer that calls others is one step: Keras's own are."""
        return ""

    def cut(self, costs: Sequence[float], num_partitions: int) -> list[int]:
        """The number of steps of each cell."""
        if num_partitions > len(self.steps):
            raise ValueError(
                "`num_partitions` must be at most the number of layers that a "
                f"model calls, {len(self.steps)}. Received: num_partitions="
                f"{num_partitions} for model '{self.model.name}'. Ask for "
                "fewer cells."
            )
        return cut_graph(costs, self.live_bytes, (), num_partitions)

    def placed_steps(self, spec: Any) -> Any:
        """Refuses what is known of single layers alone."""
        raise ValueError(
            '`tfgpipe.profile`, `tfgpipe.plan` and `costs="bytes"` need a list '
            "of layers, or a functional model, whose layers can be run one by "
            f"one. Received: model '{self.model.name}', a "
            f"{type(self.model).__name__} with a `call` of its own. Leave "
            "`costs` out: then cells are cut by FLOPs; and see `model.program`."
        )

    def config(self) -> dict[str, Any]:
        """The model as plain values."""
        return {"model": keras.saving.serialize_keras_object(self.model)}
