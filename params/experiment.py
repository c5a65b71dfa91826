"""What an experiment is."""

import dataclasses
from typing import Any, Protocol

import keras

from params import names
from params.optimizer import Optimizer
from params.source import Data
from params.task import Classification, Task
from tfgpipe.schedules import (
    CHUNKS,
    REMAT,
    SCHEDULES,
    Rule,
    checked_rule,
    rule_of,
)

_RULES = f"Known are {', '.join(REMAT)}, and shares, between 0 and 1."


def _is_rule(text: str) -> bool:
    try:
        checked_rule(rule_of(text))
    except ValueError:
        return False
    return True


class Model(Protocol):
    """A frozen dataclass with a model's parameters."""

    def layers(self) -> list[keras.layers.Layer]:
        """Makes the model's layers, new ones each time."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One training run: what, on what, how, and what should come out.

    Attributes:
        name: Field and model, such as "image.amoebanet_d_demo".
        description: One line about it.
        model: Makes the layers.
        data: Which examples.
        optimizer: The optimizer and its learning rate.
        batch_size: Examples in a mini-batch; for pairs of sentences,
            positions. Positive.
        epochs: Times that training goes through the data. Positive.
        num_partitions: K, the cells of the pipeline. Positive.
        num_micro_batches: M, the micro-batches of a mini-batch, from 1 to
            `batch_size`.
        layers_per_cell: The cut, by hand; `None` lets `tfgpipe.GPipe` balance
            the cells by estimated cost.
        schedule: As in `tfgpipe.GPipe`.
        remat: As in `tfgpipe.GPipe`: a rule, or one for each cell, "a,b,c"; a
            share is written as a number, "0.4".
        remat_groups: As in `tfgpipe.GPipe`.
        head_parts: As in `tfgpipe.GPipe`.
        weights_on: As in `tfgpipe.GPipe`.
        seed: What the initial weights and the order of the data follow from.
        task: Loss, metrics and result.
        evaluation_batch_size: As `batch_size`, for the test; `None` for the
            same.
        starts_from: Name of the experiment whose trained model this one starts
            from, with a classifier of its own; `None` for random weights.
        expected_result: What a whole run gives, in words, and what that was
            measured on.
    """

    name: str
    description: str
    model: Model
    data: Data
    optimizer: Optimizer
    batch_size: int
    epochs: int
    num_partitions: int
    num_micro_batches: int
    layers_per_cell: tuple[int, ...] | None = None
    schedule: str = "gpipe"
    remat: str = "except_last"
    remat_groups: int | None = None
    head_parts: int = 1
    weights_on: str = "devices"
    seed: int = 0
    task: Task = dataclasses.field(default_factory=Classification)
    evaluation_batch_size: int | None = None
    starts_from: str | None = None
    expected_result: str = "not measured yet"

    def __post_init__(self) -> None:
        problems = [
            f"`{field}` must be positive. Received: "
            f"{field}={getattr(self, field)}."
            for field in (
                "batch_size",
                "epochs",
                "num_partitions",
                "num_micro_batches",
                "remat_groups",
                "head_parts",
                "evaluation_batch_size",
            )
            if (getattr(self, field) or 0) < 1
            and getattr(self, field) is not None
        ]
        if self.schedule not in SCHEDULES:
            problems.append(names.unknown("schedule", self.schedule, SCHEDULES))
        elif self.num_partitions % (CHUNKS[self.schedule] or 1):
            problems.append(
                f"`num_partitions` must be {CHUNKS[self.schedule]} for each "
                f'device under schedule="{self.schedule}". Received: '
                f"num_partitions={self.num_partitions}."
            )
        problems += [
            names.unknown("remat", text, REMAT, _RULES)
            for text in dict.fromkeys(self.remat.split(","))
            if not _is_rule(text)
        ]
        if self.seed < 0:
            problems.append(
                f"`seed` must not be negative. Received: seed={self.seed}."
            )
        if any(count < 1 for count in self.layers_per_cell or ()):
            problems.append(
                "`layers_per_cell` must be positive. Received: "
                f"layers_per_cell={self.layers_per_cell}."
            )
        if self.num_micro_batches > self.batch_size > 0:
            problems.append(
                "`num_micro_batches` must be at most `batch_size`. Received: "
                f"num_micro_batches={self.num_micro_batches} and "
                f"batch_size={self.batch_size}. "
                "Raise `batch_size` or make fewer micro-batches."
            )
        if self.remat.count(",") + 1 not in (1, self.num_partitions):
            problems.append(
                "`remat` must be one rule, or one for each of the "
                f"{self.num_partitions} cells. Received: remat={self.remat!r}."
            )
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def remat_rules(self) -> list[Rule]:
        """The rule of each cell."""
        rules = [*map(rule_of, self.remat.split(","))]
        return rules if len(rules) > 1 else rules * self.num_partitions

    @property
    def remat_argument(self) -> Rule | dict[int, Rule]:
        """As `tfgpipe.GPipe` takes it; one rule is that of any cells."""
        if "," not in self.remat:
            return rule_of(self.remat)
        return dict(enumerate(self.remat_rules))

    def settings(self) -> dict[str, Any]:
        """What a run's numbers depend on: all but the texts about it."""
        found = dataclasses.asdict(self)
        del found["description"], found["expected_result"]
        return found

    def __str__(self) -> str:
        cut = f", layers_per_cell={self.layers_per_cell}"
        groups = f", remat_groups={self.remat_groups}"
        head = f", head_parts={self.head_parts}"
        place = f", weights_on={self.weights_on}"
        start = f", starts_from={self.starts_from}"
        return (
            f"{self.name}: {self.description}\n"
            f"  model      {self.model}\n"
            f"  data       {self.data}\n"
            f"  task       {self.task}\n"
            f"  optimizer  {self.optimizer}\n"
            f"  training   batch_size={self.batch_size}, "
            f"epochs={self.epochs}, seed={self.seed}"
            f"{start if self.starts_from else ''}\n"
            f"  pipeline   num_partitions={self.num_partitions}, "
            f"num_micro_batches={self.num_micro_batches}, "
            f"schedule={self.schedule}, remat={self.remat}"
            f"{groups if self.remat_groups else ''}"
            f"{head if self.head_parts > 1 else ''}"
            f"{place if self.weights_on != 'devices' else ''}"
            f"{cut if self.layers_per_cell else ''}\n"
            f"  expected   {self.expected_result}"
        )
