"""The paper's tables 1 and 2, from FLOPs and bytes alone.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import params
from params import Experiment
from params.image import AmoebaNetD
from params.lm import TransformerLM
from tfgpipe.plans import (
    MACHINES,
    PlanProblem,
    Setting,
    predict,
    prediction_that_fits,
)
from tools.bench.memory import largest
from tools.report import Table, columns, progress
from tools.sizes.model_size import sized

_GIB = 2**30
_MACHINE = MACHINES["tpu_v3_core"]


class Largest(NamedTuple):
    """A row of table 1.

    Attributes:
        model: Its name.
        k: Accelerators; 0 is without a pipeline, and without remat.
        parameters: The paper's, in millions.
        limit_gib: Of an accelerator.
        of_size: An experiment with a model of some size.
        guess: The paper's size.
    """

    model: str
    k: int
    parameters: float
    limit_gib: int
    of_size: Callable[[int], Experiment]
    guess: int


def _amoebanet(num_layers: int) -> Callable[[int], Experiment]:
    """By the number of filters, in steps of 16."""

    def of_size(size: int) -> Experiment:
        experiment = params.get("image.amoebanet_d_18_544")
        return dataclasses.replace(
            experiment, model=AmoebaNetD(num_layers, 16 * size)
        )

    return of_size


def _transformer(size: int) -> Experiment:
    """By the number of layers."""
    experiment = params.get("lm.transformer_103")
    return dataclasses.replace(experiment, model=TransformerLM(size))


TABLE_1 = [
    Largest("AmoebaNet-D (18, F)", 0, 82, 8, _amoebanet(18), 13),
    Largest("AmoebaNet-D (18, F)", 1, 318, 8, _amoebanet(18), 26),
    Largest("AmoebaNet-D (18, F)", 2, 542, 8, _amoebanet(18), 34),
    Largest("AmoebaNet-D (36, F)", 4, 1050, 8, _amoebanet(36), 34),
    Largest("AmoebaNet-D (72, F)", 8, 1800, 8, _amoebanet(72), 32),
    Largest("Transformer-L", 0, 282.2, 16, _transformer, 3),
    Largest("Transformer-L", 1, 785.8, 16, _transformer, 13),
    Largest("Transformer-L", 8, 5300, 16, _transformer, 103),
    Largest("Transformer-L", 32, 21000, 16, _transformer, 415),
    Largest("Transformer-L", 128, 83900, 16, _transformer, 1663),
]
# K, then the paper's throughput at M = 1, 4, 32, relative to K = 2, M = 1.
TABLE_2 = {
    "image.amoebanet_d_18_256": {
        2: (1, 1.07, 1.21),
        4: (1.13, 1.26, 1.84),
        8: (1.38, 1.72, 3.48),
    },
    "lm.transformer_48": {
        2: (1, 1.7, 1.8),
        4: (1.07, 3.2, 3.4),
        8: (1.3, 4.8, 6.3),
    },
}
_TABLE_1 = columns(
    "model | k: K | size: F or L | paper_size: paper | "
    "parameters: parameters (M): ,.0f | paper: paper: ,.0f | ratio: ratio: .2f"
)
_TABLE_2 = columns(
    "model | k: K | m: M | speed: speed: .2f | paper: paper: .2f | "
    "ratio: ratio: .2f"
)


def tables() -> list[Table]:
    """Both tables."""
    return [_table_1(), _table_2()]


def _table_1() -> Table:
    table = Table(
        "table_1",
        "The largest model that fits, by the planner's memory; K = 0: no "
        "pipeline, no remat",
        _TABLE_1,
    )
    for row in progress(TABLE_1, "table 1"):

        def fits(size: int, row: Largest = row) -> bool:
            return _fits(row, row.of_size(size))

        size = largest(fits, row.guess, 0.03)
        sizes = sized(row.of_size(max(size, 1))).sizes
        count = sum(s.num_params for s in sizes) / 1e6
        step = 16 if row.model.startswith("Amoeba") else 1
        table.rows.append(
            {
                "model": row.model,
                "k": row.k,
                "size": step * size,
                "paper_size": step * row.guess,
                "parameters": count,
                "paper": row.parameters,
                "ratio": count / row.parameters if size else 0.0,
            }
        )
    return table


def _fits(row: Largest, experiment: Experiment) -> bool:
    """Whether a cut of the model fits, with as many micro-batches as rows."""
    k = max(row.k, 1)
    rows = experiment.batch_size
    m = 1 if row.k == 0 else rows
    model = sized(experiment)
    if len(model.sizes) < k:
        return False
    cut = tuple(model.cut([s.flops for s in model.sizes], k))
    setting = Setting(1, k, cut, m, "gpipe", ("never",) * k)

    problem = PlanProblem(
        lambda rows: model.by_flops(_MACHINE, rows),
        model.cut,
        len(model.sizes),
        rows,
        k,
        (1,),
        row.limit_gib * _GIB,
        None,
    )
    found = prediction_that_fits(problem, setting)
    is_plain = row.k == 0
    return found is not None and (
        not is_plain or set(found.setting.remat) == {"never"}
    )


def _table_2() -> Table:
    table = Table(
        "table_2",
        "Throughput relative to K = 2, M = 1; seconds from FLOPs on a core of "
        "a TPU v3, fill-drain, the last micro-batch not recomputed",
        _TABLE_2,
        notes=["At M = 4 the paper made mini-batches larger."],
    )
    for name, known in TABLE_2.items():
        experiment = params.get(name)
        model = sized(experiment)
        speeds = {}
        for k, paper in known.items():
            cut = tuple(model.cut([s.flops for s in model.sizes], k))
            for m, expected in zip((1, 4, 32), paper):
                rows = experiment.batch_size / m
                workload = model.by_flops(_MACHINE, rows)
                rules = ("except_last",) * k
                setting = Setting(1, k, cut, m, "gpipe", rules)
                found = predict(workload, setting, _MACHINE)
                speeds[k, m] = 1 / found.step_seconds
                speed = speeds[k, m] / speeds[2, 1]
                table.rows.append(
                    {
                        "model": name,
                        "k": k,
                        "m": m,
                        "speed": speed,
                        "paper": expected,
                        "ratio": speed / expected,
                    }
                )
    return table
