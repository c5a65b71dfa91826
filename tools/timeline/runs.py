"""What a timeline can show: cells that wait, or an experiment of `params`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags

import params
from tfgpipe import timeline
from tfgpipe.commands.command_line import BadFlags
from tfgpipe.devices import local
from tfgpipe.schedules import CHUNKS, Op
from tfgpipe.timeline import Event
from tools.bench import efficiency
from tools.bench.waiting_layers import durations
from tools.train import trainer


@dataclasses.dataclass(frozen=True)
class Run:
    """One step, to be run or simulated.

    Attributes:
        what: What is trained.
        settings: Schedule, remat, K, M and chunks.
        measure: Runs it; returns when the tasks ran.
        duration: How long the tasks should take; `None` for the mean of their
            kind in their cell.
        is_simulated: Whether `measure` runs nothing.
    """

    what: str
    settings: dict[str, Any]
    measure: Callable[[], list[Event]]
    duration: Callable[[Op], float] | None = None
    is_simulated: bool = False

    @property
    def title(self) -> str:
        """The settings in words."""
        k, m, chunks = (self.settings[key] for key in ("k", "m", "chunks"))
        cells = f" devices x {chunks} cells" if chunks > 1 else ""
        return (
            f"{self.settings['schedule']}: K = {k}{cells}, M = {m}, "
            f"remat {self.settings['remat']}"
        )

    def ideal(self, events: list[Event]) -> list[Event]:
        """When the tasks would run if nothing but them took time."""
        return timeline.simulated(
            timeline.program_of(events),
            self.duration or mean_durations(events),
        )


def mean_durations(events: list[Event]) -> Callable[[Op], float]:
    """How long tasks or operations of a kind take in a cell, on average."""
    found: dict[tuple[str, int], list[float]] = {}
    for task, _, start, end in events:
        found.setdefault((task.kind, task.cell), []).append(end - start)
    means = {key: sum(values) / len(values) for key, values in found.items()}
    return lambda op: means[op.kind, op.cell]


def prepare(values: flags.FlagValues) -> Run:
    """Makes what the flags ask for."""
    if values.params is None:
        if values.set:
            raise BadFlags("--set changes an experiment: it needs --params.")
        return _waiting(values)
    for flag, is_given in (
        ("simulate", values.simulate),
        ("forward_ms", values.forward_ms is not None),
    ):
        if is_given:
            raise BadFlags(
                f"--{flag} and --params must not be given both: how long the "
                "tasks of an experiment take is measured."
            )
    return _experiment(values)


def _chunks(values: flags.FlagValues, schedule: str) -> int:
    """Cells of a device."""
    chunks = CHUNKS[schedule]
    if chunks is None:
        return values.num_chunks or 2
    if values.num_chunks not in (None, chunks):
        raise BadFlags(
            f"--num_chunks must be {chunks} unless --schedule=interleaved. "
            f"Received: --num_chunks={values.num_chunks} and the schedule "
            f"{schedule!r}."
        )
    return chunks


def _waiting(values: flags.FlagValues) -> Run:
    """Cells that wait instead of computing."""
    schedule = values.schedule or "gpipe"
    chunks = _chunks(values, schedule)
    milliseconds = values.forward_ms or 20.0
    setting = efficiency.Setting(
        schedule=schedule,
        remat=values.remat or "except_last",
        cells="equal",
        cell_ms=milliseconds * chunks,  # of all cells of a device
        k=values.k or 4,
        m=values.m or 8,
        chunks=chunks,
    )
    duration = durations(setting.seconds())
    if values.simulate:
        program = setting.program()

        def measure() -> list[Event]:
            return timeline.simulated(program, duration)

    else:
        efficiency.make_devices(setting.k)
        model = setting.model()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        rows = np.ones((setting.m, 1), np.float32)

        def measure() -> list[Event]:
            return timeline.measure(model, rows, rows)

    settings = setting._asdict()
    what = f"cells of {milliseconds:g} ms"
    return Run(what, settings, measure, duration, values.simulate)


def _experiment(values: flags.FlagValues) -> Run:
    """A mini-batch of an experiment."""
    experiment = params.override(params.get(values.params), values.set)
    given = {
        "schedule": values.schedule,
        "remat": values.remat,
        "num_micro_batches": values.m,
    }
    given = {key: value for key, value in given.items() if value is not None}
    experiment = dataclasses.replace(experiment, **given)
    chunks = _chunks(values, experiment.schedule)
    if values.k and values.k * chunks != experiment.num_partitions:
        experiment = dataclasses.replace(
            experiment, num_partitions=values.k * chunks, layers_per_cell=None
        )
    k = -(-experiment.num_partitions // chunks)
    if not local.has_accelerator():
        local.split_cpu(k)
    trained = trainer.Trainer(experiment, num_steps=1)

    def measure() -> list[Event]:
        (mini_batch,) = trained.source.train(
            experiment.batch_size,
            seed=experiment.seed,
            first_step=0,
            num_steps=1,
        )
        return timeline.measure(trained.model, *mini_batch)

    settings = {
        "schedule": experiment.schedule,
        "remat": experiment.remat,
        "k": k,
        "m": experiment.num_micro_batches,
        "chunks": chunks,
    }
    return Run(experiment.name, settings, measure)
