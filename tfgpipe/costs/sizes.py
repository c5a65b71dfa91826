"""Sizes of layers, in bytes: numbers alone, without TensorFlow."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bytes(NamedTuple):
    """Bytes for a number of rows.

    Attributes:
        fixed: Whatever the rows.
        per_row: For each row.
    """

    fixed: float
    per_row: float

    def at(self, rows: float) -> float:
        """Returns the bytes for so many rows."""
        return self.fixed + rows * self.per_row


class Activation(NamedTuple):
    """A tensor that backward passes take, seen from a step.

    Attributes:
        by: How many steps behind this one the first step is that takes it; the
            loss counts as one more step.
        size: Its bytes.
    """

    by: int
    size: Any


class StepMemory(NamedTuple):
    """The bytes that the tasks of a step keep, and need while they run.

    Sizes are numbers, for some rows, or `Bytes`. Weights and constants do not
    count.

    Attributes:
        inputs: The activations of steps before that it takes, or a later one.
        made: Those that it makes.
        crossing: Kept from the gradients of inputs to the weights' gradients.
        sparse: Slices of gradients that are not added up, but kept.
        forward: Needed at most while the forward pass runs, with outputs.
        backward: Needed at most, beside what is kept, while the backward pass
            runs, with the gradients of outputs and inputs.
        reaches: How many steps before this one the first step is that takes
            gradients which this one makes.
    """

    inputs: tuple[Activation, ...] = ()
    made: tuple[Activation, ...] = ()
    crossing: Any = 0
    sparse: Any = 0
    forward: Any = 0
    backward: Any = 0
    reaches: int = 0


class LayerSize(NamedTuple):
    """The size of one step of a model; of tied weights, the first has all.

    Attributes:
        name: Of its layer.
        num_params: Numbers in its trainable weights.
        num_values: Numbers in all its weights.
        weight_bytes: Bytes of these.
        slot_bytes: Bytes that the optimizer keeps for them.
        gradient_bytes: Bytes of a gradient for each trainable weight.
        flops: Of a row's forward pass.
        live_bytes: Of a row of what is alive before it, which crosses if a
            cell begins with it.
        memory: Of its tasks: `Bytes`.
        dtype: In which most of its FLOPs are computed.
    """

    name: str
    num_params: int
    num_values: int
    weight_bytes: int
    slot_bytes: int
    gradient_bytes: int
    flops: float
    live_bytes: float
    memory: StepMemory
    dtype: str = "float32"
