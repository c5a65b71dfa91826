"""A random case: what is trained, how, and what is checked of it.

A case is plain data, so that it can be printed, shrunk and read again. What has
its default is left out of the text:

    {"layers": [{"name": "a", "kind": "dense"}], "num_micro_batches": 2}
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

Options = dict[str, Any]
# Options that tell kinds apart.
DETAILS = (
    *("inner", "reads", "by", "renorm", "dtype", "which"),
    *("rule", "how", "place", "size", "axis", "made"),
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A layer as plain data."""

    name: str  # others refer to it by this
    kind: str  # which row of `layer_kinds.py` makes it
    options: Options = dataclasses.field(default_factory=dict)
    takes: tuple[str, ...] = ()  # in a graph, the layers that it is called on


@dataclasses.dataclass(frozen=True)
class Case:
    """All that is random."""

    layers: tuple[Spec, ...]
    # Of a functional model, the layers that give them; None of a list.
    outputs: tuple[str, ...] | None = None
    inputs: str = "vector"  # see `data_sources.py`
    length: int | None = None  # of a sequence, where the model takes any
    explicit_input: bool = False  # the list begins with a `keras.Input`
    frozen: tuple[str, ...] = ()  # set to `trainable=False` when all are made
    unfreezes: bool = False  # they are trained again when the model is built
    labels: str | None = None  # see `objectives.py`; None for what suits
    losses: Any = "MeanSquaredError"  # or a dict or list by output
    reduction: str | None = None
    loss_weights: Any = None
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()
    weights: str | None = None  # "rows", "positions" or "classes"
    optimizer: Options = dataclasses.field(
        default_factory=lambda: {"name": "SGD"}
    )
    source: str = "arrays"  # see `data_sources.py`
    rows: int = 6
    batch_size: int = 6
    epochs: int = 1
    infers: bool = False  # compares validation, `evaluate` and `predict`
    num_partitions: int = 1
    cut_seed: int = 0  # of `layers_per_cell`; 0 to have the cells balanced
    num_micro_batches: int = 1
    num_replicas: int = 1
    schedule: str = "gpipe"
    remat: Any = "except_last"  # or "mixed", another rule a cell
    weights_on: str = "devices"
    head_parts: int = 1
    shards: int = 1  # devices of each layer that has columns
    remat_groups: int = 1
    # Of the second pipeline; M and R of one from a file, None for the same.
    other_partitions: int = 1
    other_remat: str = "except_last"
    other_micro_batches: int | None = None
    other_replicas: int | None = None
    cells: tuple[int, ...] | None = None  # `layers_per_cell`, if K of them
    override: str | None = None  # what a subclass does, see `mid_run.py`
    toggle: str | None = None  # what a callback changes after an epoch
    bad_row: int | None = None  # is NaN, and its mini-batch is skipped
    # What else is checked: "another K", "file", "weights" or "eager".
    then: str | None = None
    seed: int = 0
    dtype: str = "float64"  # TensorFlow has other kernels for "float32"
    jit_compile: bool = False

    def __str__(self) -> str:
        """One line of JSON, without what has its default."""
        plain = dataclasses.asdict(Case(()))
        found = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value != plain[name]
        }
        found["layers"] = [
            {key: value for key, value in spec.items() if value}
            for spec in found["layers"]
        ]
        return json.dumps(found)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of `str(case)`."""
        found = {
            name: tuple(value)
            if isinstance(value, list)
            and name not in ("losses", "loss_weights")
            else value
            for name, value in json.loads(text).items()
        }
        found["layers"] = tuple(
            Spec(**{**spec, "takes": tuple(spec.get("takes", ()))})
            for spec in found["layers"]
        )
        return cls(**found)

    def tags(self) -> list[str]:
        """The categories that the case is in, for the table."""
        found = {
            *(f"layer {kind}" for kind in kinds_of(self.layers)),
            *(f"loss {name}" for name in flat(self.losses)),
            *(f"metric {n}" for n in (*self.metrics, *self.weighted_metrics)),
            *(f"optimizer {k}" for k in self.optimizer.get("options", ())),
            f"optimizer {self.optimizer['name']}",
        }
        for name in ("bad_row", "cells", "frozen", "outputs"):
            if getattr(self, name) not in (None, ()):
                found.add(name)
        for name in (
            "dtype head_parts inputs jit_compile labels length num_partitions "
            "num_micro_batches num_replicas other_micro_batches other_replicas "
            "override reduction remat remat_groups schedule shards source then "
            "toggle unfreezes weights weights_on"
        ).split():
            found.add(f"{name} {getattr(self, name)}")
        return sorted(found)


def kinds_of(layers: Any) -> set[str]:
    """The kinds of layers, inner ones too, and what tells them apart."""
    found = set()
    kinds = {spec.name: spec.kind for spec in layers}
    for spec in layers:
        found.add(spec.kind)
        if spec.kind == "again" and spec.options["of"] in kinds:
            found.add(f"again of {kinds[spec.options['of']]}")
        found |= {inner["kind"] for inner in spec.options.get("layers", ())}
        for name in DETAILS:
            if name in spec.options:
                found.add(f"{spec.kind} of {spec.options[name]}")
    return found


def flat(losses: Any) -> list[str]:
    """The names of all losses."""
    if isinstance(losses, str):
        return [losses]
    return list(losses.values() if isinstance(losses, dict) else losses)
