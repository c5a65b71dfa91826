"""What a planner proposes, as arguments and as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfgpipe.devices import PipelineStrategy, strategy
from tfgpipe.plans.prediction import Prediction

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings that are predicted to train fastest, within a limit.

    `print` it for a table: a line for each of the best settings, and what makes
    it slower than the first.

    Attributes:
        choices: Predictions, the fastest first; that is the plan.
        batch_size: Rows of a mini-batch.
        device_names: Names of all devices.
        names_are_given: Whether the user named them.
        memory_limit: Bytes of a device; None for any.
        basis: What seconds are from.
    """

    choices: tuple[Prediction, ...]
    batch_size: int
    device_names: tuple[str, ...]
    names_are_given: bool
    memory_limit: float | None
    basis: str

    @property
    def best(self) -> Prediction:
        """The first of the choices."""
        return self.choices[0]

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a training step."""
        return self.best.step_seconds

    @property
    def device_bytes(self) -> list[int]:
        """Predicted bytes at the peak, one a device of a replica."""
        return self.best.device_bytes

    @property
    def num_replicas(self) -> int:
        """R. Above 1, make the model in the scope of `strategy()`."""
        return self.best.setting.num_replicas

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `GPipe`, except the layers.

        Raises:
            ValueError: If the plan has replicas, and this is not called in the
                scope of a strategy that has them.
        """
        setting = self.best.setting
        self._check_scope(setting.num_replicas)
        rules = set(setting.remat)
        remat: Any = setting.remat[0]
        if len(rules) > 1:
            remat = dict(enumerate(setting.remat))
        found: dict[str, Any] = {
            "num_partitions": setting.num_partitions,
            "num_micro_batches": setting.num_micro_batches,
            "layers_per_cell": list(setting.layers_per_cell),
            "schedule": setting.schedule,
            "remat": remat,
            "remat_groups": setting.remat_groups,
        }
        # By itself, `GPipe` takes the first K accelerators, or all.
        is_needed = self.names_are_given or setting.schedule == "interleaved"
        if is_needed and setting.num_replicas == 1:
            found["devices"] = list(self.device_names[: setting.num_devices])
        return found

    def strategy(self) -> PipelineStrategy:
        """A new strategy of the plan's replicas, on the plan's devices."""
        setting = self.best.setting
        count = setting.num_replicas * setting.num_devices
        return PipelineStrategy(
            setting.num_replicas,
            setting.num_devices,
            self.device_names[:count],
        )

    def _check_scope(self, num_replicas: int) -> None:
        current = strategy.current()
        wanted = (num_replicas, self.best.setting.num_devices)
        found = None
        if current is not None:
            found = current.num_replicas, current.num_partitions
        if found != (None if num_replicas == 1 and found is None else wanted):
            raise ValueError(
                f"A plan with {wanted[0]} replicas of {wanted[1]} devices must "
                "be used in the scope of a strategy that has them. Received: "
                f"the scope of {'none' if current is None else current}. Write "
                "`with plan.strategy().scope():` around the making of the "
                "model, or plan with num_replicas=1."
            )

    def __str__(self) -> str:
        """The table."""
        rows = [
            "R K M schedule remat groups s/step bubble MiB/device cells why"
        ]
        lines = [rows[0].split()]
        lines += [self._row(choice) for choice in self.choices]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = [
            "  ".join(
                text.ljust(width) if i in (3, 4, 9, 10) else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths))
            ).rstrip()
            for line in lines
        ]
        limit = (
            "no memory limit"
            if self.memory_limit is None
            else f"at most {self.memory_limit / _MIB:,.0f} MiB a device"
        )
        head = f"mini-batches of {self.batch_size}; {limit}; {self.basis}"
        return "\n".join([head, *table])

    def _row(self, choice: Prediction) -> list[str]:
        setting = choice.setting
        rules = list(dict.fromkeys(setting.remat))
        cells = " ".join(map(str, setting.layers_per_cell))
        if len(cells) > 24:
            cells = cells[:21] + "..."
        return [
            str(setting.num_replicas),
            str(setting.num_partitions),
            str(setting.num_micro_batches),
            setting.schedule,
            rules[0] if len(rules) == 1 else "by cell",
            str(setting.remat_groups),
            f"{choice.step_seconds:.3g}",
            f"{choice.bubble:.0%}",
            f"{max(choice.device_bytes) / _MIB:,.0f}",
            cells,
            self._why(choice),
        ]

    def _why(self, choice: Prediction) -> str:
        """What makes a choice slower than the best: the largest of causes."""
        best = self.best
        if choice is best:
            limit = self.memory_limit
            fits = limit is None or max(choice.device_bytes) <= limit
            return "the plan" if fits else "does not fit"
        more = choice.step_seconds / best.step_seconds - 1
        causes = {
            f"bubble {choice.bubble:.0%}": choice.bubble * choice.step_seconds
            - best.bubble * best.step_seconds,
            "computes more again": choice.recompute_seconds
            - best.recompute_seconds,
            "update and exchange": choice.update_seconds - best.update_seconds,
            "slower tasks": choice.busy_seconds - best.busy_seconds,
        }
        return f"+{more:.1%}: {max(causes, key=causes.__getitem__)}"
