"""What was measured of a layer: plain records."""

from __future__ import annotations

import dataclasses
from typing import Any

MEASURED = (
    "forward",
    "recompute",
    "recompute_last",
    "backward",
    "input_gradient",
    "weight_gradient",
)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds that were measured again and again.

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


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """What a layer needs.

    Attributes:
        name: Of the layer.
        key: A text that layers of one class, configuration and shapes of
            weights share.
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


def layer_from(values: dict[str, Any]) -> LayerProfile:
    """A record of plain values, as `dataclasses.asdict` makes them."""
    measured = tuple(map(_tasks, values.pop("measured")))
    return LayerProfile(measured=measured, **values)


def _tasks(values: dict[str, Any]) -> TaskSeconds:
    def made(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if not all(isinstance(v, (int, float)) for v in value.values()):
            raise ValueError(f"{value} must hold seconds")
        return Spread(**value)

    return TaskSeconds(**{name: made(own) for name, own in values.items()})
