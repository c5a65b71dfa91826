"""A list of layers that grows, and what may come next."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from case import Spec

# What makes no new layer, or takes no argument of one.
NO_LAYERS = {"again", "closure", "inner_of", "model", "op", "plus"}


@dataclasses.dataclass
class Growth:
    """What is known of the list so far.

    Attributes:
        rng: Where choices come from.
        shape: Of a row.
        specs: The layers.
        state: "tensor", "nest" or "complex".
        squares: Names of dense layers, by their units.
        spectrals: Those of `SpectralNormalization`, by units.
        keeping: Layers that keep the shape and may be listed again, with it.
        counters: Names of step counters.
        has_mask: Whether a mask travels along.
        is_wide: Whether kinds are drawn that came later, too.
        at: In a graph, what the next layer is called on.
        tensors: In a graph, what there is to call layers on, with its shape.
        states: Layers that keep state, with the shape that they have seen.
        planned: What has to be added, at some time.
    """

    rng: random.Random
    shape: tuple[Any, ...]
    specs: list[Spec] = dataclasses.field(default_factory=list)
    state: str = "tensor"
    squares: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    spectrals: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    keeping: list[tuple[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )
    counters: list[str] = dataclasses.field(default_factory=list)
    has_mask: bool = False
    is_wide: bool = False
    at: str = ""
    tensors: list[tuple[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )
    states: list[tuple[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )

    planned: list[Callable[[Growth], None]] = dataclasses.field(
        default_factory=list
    )

    def add_planned(self, is_last: bool = False) -> bool:
        """At times, and at last, adds what has to be; says whether it did."""
        if self.planned and (is_last or self.rng.random() < 0.4):
            self.planned.pop()(self)
            return True
        return False

    @property
    def width(self) -> int:
        return self.shape[-1]

    def add(
        self,
        kind: str,
        keeps: bool = True,
        takes: tuple[str, ...] = (),
        **options: Any,
    ) -> str:
        """Adds a layer, sometimes a frozen one; returns its name."""
        name = f"l{len(self.specs)}"
        if kind not in NO_LAYERS and self.rng.random() < 0.08:
            options["frozen"] = True
        if self.at:
            takes, self.at = takes or (self.at,), name
        self.specs.append(Spec(name, kind, options, takes))
        if keeps:
            self.keeping.append((name, self.shape))
        return name

    def units(self) -> int:
        """The width again, mostly, so that layers can share."""
        return (
            self.width if self.rng.random() < 0.7 else self.rng.choice((2, 3))
        )
