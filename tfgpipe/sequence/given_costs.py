"""What `GPipe(costs=...)` says of the layers' costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras import tree

from tfgpipe.cells import GraphStep
from tfgpipe.checks import is_amount
from tfgpipe.planning import (
    PlacedStep,
    Profile,
    kept_in_row,
    layer_key,
    layer_sizes,
    slot_bytes_of,
)

_NAMES = ("flops", "bytes")


class GivenCosts:
    """The argument `costs`, checked, and what follows from it.

    Args:
        costs: See `GPipe`.
        source: The layers. Costs that are known become its own.

    Attributes:
        unit: Of the costs; empty for one that the user knows.
        profile: What was measured, or None.
        source: The layers.
        problems: What is wrong.
    """

    def __init__(self, costs: Any, source: Any):
        self.problems: list[str] = []
        self.profile: Any = costs if isinstance(costs, Profile) else None
        self._is_bytes = isinstance(costs, str) and costs == "bytes"
        self.source = source
        in_pairs = sum(c is not None for c in source.costs)
        self.unit = "" if in_pairs else "FLOPs"
        if isinstance(costs, str) and costs == "flops":
            return
        if in_pairs:
            self.problems.append(
                "`costs` must say what all layers cost, or nothing. Received: "
                f"`costs` beside {in_pairs} pairs (layer, cost). Pass the "
                "layers by themselves, or leave `costs` out."
            )
        numbers = self._numbers(costs)
        if self._is_bytes:
            self.unit = "bytes"
        elif self.profile is not None:
            self.unit = "s"
        else:
            self.unit = ""
        if numbers and not self.problems:
            source.costs = numbers

    def _numbers(self, costs: Any) -> list[float]:
        """A cost for each step; none if they are not known, or wrong."""
        if self._is_bytes:
            return []
        if self.profile is not None:
            costs = self.profile.costs()
        is_list = isinstance(costs, Iterable) and not isinstance(costs, str)
        found = [*costs] if is_list else []
        num_layers = len(self.source.steps)
        if len(found) == num_layers and all(map(is_amount, found)):
            return [float(value) for value in found]
        received = f"costs={costs!r}"
        if self.profile is not None:
            received = f"a profile of {len(found)} layers"
        elif is_list:
            received += f" ({len(found)} numbers)"
        self.problems.append(
            f"`costs` must be one of {[*_NAMES]}, what `tfgpipe.profile` "
            "returned for these layers, or a list of finite numbers from 0. "
            f"Expected {num_layers} of them (the number of layers). "
            f"Received: {received}. Leave it out to cut by FLOPs."
        )
        return []

    def _check_profile(self, profile: Profile) -> None:
        """Refuses one of other layers, now that the layers are built."""
        steps = self.source.steps
        keys = [
            layer_key(s.layer, s if isinstance(s, GraphStep) else None)
            for s in steps
        ]
        profile.check([step.layer.name for step in steps], keys)

    def resolved(self, costs: list[float], spec: Any) -> list[float]:
        """The costs of the layers, which are built.

        Args:
            costs: Those that the source has inferred.
            spec: What comes into the first layer.

        Raises:
            ValueError: If a profile is one of other layers.
        """
        if self.profile is not None:
            self._check_profile(self.profile)
        if not self._is_bytes:
            return costs
        steps, _ = self.source.placed_steps(spec)
        _check_sizes(steps)
        sizes = layer_sizes(steps, slot_bytes_of("adam"))
        kept = kept_in_row(
            [
                (s.kept_inputs.of(1), s.kept_outputs.of(1), s.kept_others.of(1))
                for s in sizes
            ]
        )
        return [
            size.weight_bytes + size.slot_bytes + size.gradient_bytes + own
            for size, own in zip(sizes, kept)
        ]


def _check_sizes(steps: Sequence[PlacedStep]) -> None:
    """Refuses steps whose bytes cannot be told."""
    for step in steps:
        for tensor in tree.flatten(step.live):
            if tensor is not None and None in tensor.shape[1:]:
                raise ValueError(
                    'costs="bytes" needs layers whose inputs have known sizes. '
                    f"Received: layer '{step.layer.name}' with an input of "
                    f"shape {tuple(tensor.shape)}. Make the `keras.Input` with "
                    "all sizes but that of the batch, or measure: "
                    "`tfgpipe.profile(layers, x).bytes()`."
                )
