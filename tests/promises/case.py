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
HOLDERS = {
    "bidirectional",
    "outputs",
    "self_attention",
    "spectral",
    "step",
    "time_distributed",
}
# Options that tell kinds apart.
DETAILS = (
    *("inner", "reads", "by", "renorm", "dtype", "which"),
    *("rule", "how", "place", "size", "axis", "made"),
)
TUPLES = "layers outputs frozen metrics weighted_metrics cells".split()


@dataclasses.dataclass(frozen=True)
class Spec:
    """A layer as plain data.

    Attributes:
        name: Of the layer; others refer to it by this.
        kind: Which function of `layer_kinds.py` makes it.
        options: For that function.
        takes: In a graph, the layers whose outputs it is called on.
    """

    name: str
    kind: str
    options: Options = dataclasses.field(default_factory=dict)
    takes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """All that is random.

    Attributes:
        layers: The layers in order.
        outputs: Of a functional model, the layers that give them; None where
            the layers are a list.
        inputs: What `x` is: "vector", "sequence", "image", "tokens", "dict", or
            a "pair" of vectors, which may come by "names", or "bytes".
        length: Of a sequence, where the model takes any; None for a usual one.
        explicit_input: Whether the list begins with a `keras.Input`.
        frozen: Names of layers whose `trainable` is set to False later.
        unfreezes: Whether they are trained again when the model is built.
        labels: What `y` holds, see `objectives.py`; None for what suits the
            loss.
        losses: Name of the loss; or a dict or list of them by output.
        reduction: Of losses that are classes; None for their default.
        loss_weights: As in `compile`.
        metrics: Names.
        weighted_metrics: Names.
        weights: "rows", "positions", "classes" or None.
        optimizer: Name, and "options" for it.
        source: How the data comes, see `data_sources.py`.
        rows: Of all data.
        batch_size: Rows of a mini-batch.
        epochs: Of `fit`.
        infers: Whether to compare `validation_data`, `evaluate` and `predict`.
        num_partitions: K.
        cut_seed: Of `layers_per_cell`; 0 to have the cells balanced.
        num_micro_batches: M.
        num_replicas: R.
        schedule: Its name.
        remat: Name of the rule, or "mixed" for another one a cell.
        weights_on: Where the pipelines have their weights.
        head_parts: Into how many parts the rows go through their heads.
        shards: How many devices compute each layer that has columns.
        remat_groups: Groups a cell.
        other_partitions: K of the second pipeline.
        other_remat: Rule of the second pipeline.
        other_micro_batches: M of a pipeline from a file; None for the same.
        other_replicas: R of a pipeline from a file; None for the same.
        cells: `layers_per_cell`, where K is their number; None to draw it.
        override: What a subclass does itself, see `mid_run.OVERRIDES`; or
            None.
        toggle: What a callback changes after the first epoch: "learning_rate",
            "trainable", "weights" or None.
        bad_row: Of the data, which is NaN and whose mini-batch is skipped.
        then: What else is checked: "another K", "file", "weights", "eager" or
            None.
        seed: Of weights and data.
        dtype: Of all that is computed. TensorFlow has faster kernels for
            "float32", and other rewrites of its graphs.
        jit_compile: Whether XLA compiles the pipelines.
    """

    layers: tuple[Spec, ...]
    outputs: tuple[str, ...] | None = None
    inputs: str = "vector"
    length: int | None = None
    explicit_input: bool = False
    frozen: tuple[str, ...] = ()
    unfreezes: bool = False
    labels: str | None = None
    losses: Any = "MeanSquaredError"
    reduction: str | None = None
    loss_weights: Any = None
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()
    weights: str | None = None
    optimizer: Options = dataclasses.field(
        default_factory=lambda: {"name": "SGD"}
    )
    source: str = "arrays"
    rows: int = 6
    batch_size: int = 6
    epochs: int = 1
    infers: bool = False
    num_partitions: int = 1
    cut_seed: int = 0
    num_micro_batches: int = 1
    num_replicas: int = 1
    schedule: str = "gpipe"
    remat: str = "except_last"
    weights_on: str = "devices"
    head_parts: int = 1
    shards: int = 1
    remat_groups: int = 1
    other_partitions: int = 1
    other_remat: str = "except_last"
    other_micro_batches: int | None = None
    other_replicas: int | None = None
    cells: tuple[int, ...] | None = None
    override: str | None = None
    toggle: str | None = None
    bad_row: int | None = None
    then: str | None = None
    seed: int = 0
    dtype: str = "float64"
    jit_compile: bool = False

    def __str__(self) -> str:
        """One line of JSON, without what has its default."""
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "layers":
                found["layers"] = [_plain(spec) for spec in value]
            elif value != _default(field):
                found[field.name] = value
        return json.dumps(found)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of `str(case)`."""
        found = json.loads(text)
        for spec in found["layers"]:
            spec["takes"] = tuple(spec.get("takes", ()))
        found["layers"] = [Spec(**spec) for spec in found["layers"]]
        for name in TUPLES:
            if found.get(name) is not None:
                found[name] = tuple(found[name])
        return cls(**found)

    def tags(self) -> list[str]:
        """The categories that the case is in, for the table."""
        first = {s.name for s in self.layers if s.options.get("frozen")}
        frozen = {*first, *self.frozen}
        held = any(s.name in frozen and _holds(s) for s in self.layers)
        found = {
            *(f"layer {kind}" for kind in kinds_of(self.layers)),
            *(["frozen in its constructor"] if first else []),
            *(["frozen later"] if self.frozen else []),
            *(["layers in a frozen layer"] if held else []),
            *(f"loss {name}" for name in flat(self.losses)),
            *(f"metric {name}" for name in self.metrics),
            *(f"metric {name}" for name in self.weighted_metrics),
            *(f"optimizer {k}" for k in self.optimizer.get("options", ())),
            f"optimizer {self.optimizer['name']}",
            f"data {self.source}",
            f"K {self.num_partitions}",
            f"M {self.num_micro_batches}",
            f"R {self.num_replicas}",
            *(["functional"] if self.outputs else []),
            *(["unfrozen"] if self.unfreezes else []),
            *(["skips a mini-batch"] if self.bad_row is not None else []),
            *(["alike cells"] if self.cells else []),
            *(["micro-batches without rows"] if self._is_short else []),
        }
        for name in (
            "override toggle length other_micro_batches other_replicas".split()
        ):
            if getattr(self, name):
                found.add(f"{name} {getattr(self, name)}")
        for name in (
            "inputs labels reduction weights schedule remat remat_groups then "
            "weights_on shards dtype jit_compile"
        ).split():
            found.add(f"{name} {getattr(self, name)}")
        return sorted(found)

    @property
    def _is_short(self) -> bool:
        """Whether the last mini-batch has fewer rows than micro-batches."""
        rest = self.rows % self.batch_size
        keeps = self.source not in ("uneven", "remainder")
        return keeps and 0 < rest < self.num_micro_batches


def kinds_of(layers: Any) -> set[str]:
    """The kinds of layers, inner ones too."""
    found = set()
    kinds = {spec.name: spec.kind for spec in layers}
    for spec in layers:
        found.add(spec.kind)
        if spec.kind == "again" and spec.options["of"] in kinds:
            found.add(f"again of {kinds[spec.options['of']]}")
        for inner in spec.options.get("layers", ()):
            found.add(inner["kind"])
        for name in DETAILS:
            if name in spec.options:
                found.add(f"{spec.kind} of {spec.options[name]}")
    return found


def _holds(spec: Spec) -> bool:
    """Whether a layer has others inside, or reads others."""
    plain = {"of", "inner", "layers"} & set(spec.options)
    return bool(plain) or spec.kind in HOLDERS


def flat(losses: Any) -> list[str]:
    """The names of all losses."""
    if isinstance(losses, str):
        return [losses]
    values = losses.values() if isinstance(losses, dict) else losses
    return list(values)


def _plain(spec: Spec) -> Options:
    found: Options = {"name": spec.name, "kind": spec.kind}
    if spec.options:
        found["options"] = spec.options
    if spec.takes:
        found["takes"] = spec.takes
    return found


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
