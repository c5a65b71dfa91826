"""The plan that is chosen, beside the best of a grid that is measured whole."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import keras

import tfgpipe
from tfgpipe.devices import local
from tfgpipe.plans import Setting
from tools.bench.models import MODELS
from tools.bench.plan_steps import Measured, made_step, measure, step_seconds
from tools.report import Column, Table, alternated, progress

_COLUMNS = [
    Column("model", "model"),
    Column("chosen_by", "chosen by"),
    Column("schedule", "schedule"),
    Column("k", "K"),
    Column("m", "M"),
    Column("step_ms", "step ms", ".1f"),
    Column("predicted_ms", "predicted", ".1f"),
    Column("ratio", "/ best", ".3f"),
]
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# So many of the fastest of the grid are measured once more, in turns with the
# plan: the fastest of many single measurements is partly luck.
_FINALISTS = 4
_MORE_ROUNDS = 4


def table(rounds: int, seconds: float) -> Table:
    """Plans for each model, and measures what else could have been chosen.

    Args:
        rounds: Steps of a setting; the median counts.
        seconds: For which a model's layers are measured.
    """
    local.split_cpu(2)
    found = Table(
        "grid",
        "The plan for two devices of a core each, and the best of a grid: one "
        "device or two, M up to 32, gpipe, 1f1b, interleaved, zero_bubble",
        _COLUMNS,
    )
    for name in progress(MODELS, "models"):
        own = measure(name, MODELS[name], seconds)
        found.rows += _rows(own, rounds)
    worst = max(row["ratio"] for row in found.rows)
    found.notes.append(f"The plan takes at most {worst:.3f} of the best")
    return found


def _rows(own: Measured, rounds: int) -> list[dict[str, Any]]:
    """The plan, and the best."""
    plan = tfgpipe.plan(
        [keras.Input(own.model.x_shape), *own.model.layers()],
        own.model.batch_size,
        own.profile,
        devices=["CPU:0", "CPU:1"],
        optimizer="sgd",
    )
    chosen = plan.best.setting
    times = {
        setting: step_seconds(own.model, setting, rounds)
        for setting in progress([*_grid(own)], f"grid of {own.name}")
    }
    others = sorted(times.keys() - {chosen}, key=times.__getitem__)
    finalists = [chosen, *others[:_FINALISTS]]
    steps = [made_step(own.model, setting) for setting in finalists]
    for step in steps:
        step()  # traces
    last = alternated(steps, _MORE_ROUNDS * rounds, f"best of {own.name}")
    medians = dict(zip(finalists, map(statistics.median, last)))
    best = min(medians, key=medians.__getitem__)
    return [
        {
            "model": own.name,
            "chosen_by": name,
            "schedule": setting.schedule,
            "k": setting.num_partitions,
            "m": setting.num_micro_batches,
            "step_ms": 1e3 * medians[setting],
            "predicted_ms": 1e3 * own.predicted(setting),
            "ratio": medians[setting] / medians[best],
            "layers_per_cell": list(setting.layers_per_cell),
            "grid": [
                [*map(str, s), 1e3 * seconds] for s, seconds in times.items()
            ],
        }
        for name, setting in (("plan", chosen), ("grid", best))
    ]


def _grid(own: Measured) -> Iterator[Setting]:
    """Settings without recomputations, which only cost time."""
    most = len(own.sized.sizes)
    shapes = [("gpipe", 1, 1), ("gpipe", 2, 2), ("1f1b", 2, 2)]
    shapes += [("zero_bubble", 2, 2)]
    shapes += [("interleaved", 2, k) for k in (4, 8) if k <= most]
    for schedule, num_devices, k in shapes:
        for m in MICRO_BATCHES:
            yield own.setting(schedule, "never", num_devices, k, m)
