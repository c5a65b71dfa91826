"""What was measured of a layer: plain records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

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


def share_between_quartiles(found: Iterable[Spread | None]) -> float:
    """How far measurements lie apart, as a share of what was measured.

    What takes long counts most, what takes no time at all does not count.

    Args:
        found: Of some tasks; None where there is none.
    """
    known = [s for s in found if s is not None and s.low > _SHORT]
    width = sum(s.high - s.low for s in known)
    return width / sum(s.low for s in known) if known else 0.0


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

    @property
    def has_halves(self) -> bool:
        """Whether its tasks can be cut, as loops that XLA compiles cannot.

        What these need is recomputed within their backward task.
        """
        return all(
            own.recompute is not None or own.backward is None
            for own in self.measured
        )


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
