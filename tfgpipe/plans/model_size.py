"""What the layers of a model need, before any of them is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import tree

from tfgpipe.costs import (
    LayerSize,
    PlacedCall,
    layer_key,
    layer_sizes,
    slot_bytes_of,
)
from tfgpipe.devices import placement
from tfgpipe.plans.machine import Machine
from tfgpipe.plans.workload import Workload, seconds_by_flops
from tfgpipe.profiles import LayerSeconds


class SizedModel(NamedTuple):
    """The layers of a model, how they are called, and what each needs.

    Attributes:
        output_bytes: Of a row of the last layer's outputs.
        keys: What layers are, see `layer_key`.
    """

    source: Any
    sizes: list[LayerSize]
    output_bytes: int
    keys: list[str]

    def by_flops(self, machine: Machine, rows: float) -> Workload:
        """For micro-batches of so many rows, with seconds from FLOPs."""
        seconds = [seconds_by_flops(size, rows, machine) for size in self.sizes]
        last = seconds[-1]  # the loss, behind it, is taken to keep its outputs
        seconds[-1] = last._replace(recompute_last=last.recompute)
        return self.workload(seconds, machine.task_seconds, rows)

    def by_profile(self, profile: Any, rows: float) -> Workload:
        """For micro-batches of so many rows, with seconds as measured."""
        return self.workload(
            profile.layer_seconds(rows),
            profile.call_seconds,
            rows,
            profile.jit_compile,
        )

    def workload(
        self,
        seconds: Sequence[LayerSeconds],
        task_seconds: float,
        rows: float,
        is_compiled: bool = False,
    ) -> Workload:
        """The layers with their seconds, for micro-batches of so many rows."""
        return Workload(
            self.sizes,
            self.output_bytes,
            seconds,
            task_seconds,
            rows,
            is_compiled,
        )


def sized(source: Any, inputs: Any, optimizer: Any) -> SizedModel:
    """What each layer of a `Source` needs, without allocating any of it.

    Raises:
        ValueError: If the layers or their inputs cannot be planned for.
    """
    if source.problems:
        raise ValueError("\n".join(source.problems))
    steps, outputs = source.placed_steps(_checked_inputs(source, inputs))
    leaves = [t for t in tree.flatten(outputs) if t is not None]
    rows = [keras.KerasTensor((1, *t.shape[1:]), t.dtype) for t in leaves]
    return SizedModel(
        source,
        layer_sizes(steps, slot_bytes_of(optimizer)),
        sum(map(placement.num_bytes, rows)),
        _keys(steps),
    )


def _keys(steps: Sequence[PlacedCall]) -> list[str]:
    """What layers are; of equal ones, what the first is, which is built."""
    known: dict[Any, str] = {}
    for step in steps:
        if step.key not in known:
            known[step.key] = layer_key(step.call)
    return [known[step.key] for step in steps]


def _checked_inputs(source: Any, inputs: Any) -> Any:
    """What the first layer takes, all sizes but the rows known."""
    spec = source.input_spec if inputs is None else inputs
    if inputs is not None and source.input_spec is not None:
        raise ValueError(
            "`inputs` must be left out for a model, or a list that begins with "
            f"a `keras.Input`. Received: inputs={inputs}. Make it of inputs "
            "whose sizes are known."
        )
    if spec is None:
        raise ValueError(
            "`inputs` must tell what a list of layers without a `keras.Input` "
            "takes. Received: inputs=None. Let the list begin with "
            "`keras.Input(shape)`, or pass `inputs=keras.Input(shape)`."
        )
    for leaf in tree.flatten(spec):
        if leaf is not None and not isinstance(leaf, keras.KerasTensor):
            raise ValueError(
                "`inputs` must hold `keras.Input`s. Received: "
                f"{leaf!r} in inputs={inputs!r}. Pass `keras.Input(shape)`, "
                "where `shape` is that of a row."
            )
        if leaf is not None and None in leaf.shape[1:]:
            raise ValueError(
                "`inputs` must have known sizes: what layers take depends on "
                f"them. Received: an input of shape {tuple(leaf.shape)}. Make "
                "it of the sizes that are usual, as `keras.Input((512,))`."
            )
    return spec
