"""R replicas of K devices: steps of timed cells.

Every cell waits instead of computing, on a device of its own in every
replica, and its update waits for 40 ms first, as if gradients were
still on the way from other replicas. The bound is what the tasks of one replica
take, `efficiency` its share of a step without exchange; `hidden` is the share
of the exchange during which any device still had a task to do.
"""

import itertools
import time
from typing import Any

import keras
import numpy as np
from absl import flags

import tfgpipe
from tools.bench.efficiency import Setting, make_devices
from tools.bench.models import train_step
from tools.bench.waiting_layers import Device, Timed, Work
from tools.flags import define, new_flags
from tools.report import Report, Table, columns, progress, spread, spread_values

FLAGS = new_flags(rounds=5)
define(
    FLAGS,
    r=([1, 2, 4], "Replicas."),
    k=([2, 4], "Devices of a replica."),
    m=([8], "Micro-batches of a replica."),
)

_CELL_MS = 20.0  # of a forward task
_EXCHANGE_MS = 40.0  # of a cell

COLUMNS = columns(
    "r: R | k: K | m: M | bound_ms: bound ms: .1f | "
    "*step_ms: step ms: .1f | efficiency: efficiency: .3f | "
    "*exchange_step_ms: with exchange ms: .1f | hidden: hidden: .0%"
)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    make_devices(max(values.r) * max(values.k))
    table = report.add(
        Table(
            "speed",
            f"Steps of cells of {_CELL_MS:g} ms, without exchange and with one "
            f"of {_EXCHANGE_MS:g} ms a cell: median and quartiles of "
            f"{values.rounds}",
            COLUMNS,
        )
    )
    settings = [*itertools.product(values.r, values.k, values.m)]
    for r, k, m in progress(settings, "speed"):
        one = Setting("gpipe", "except_last", "equal", _CELL_MS, k, m, 1)
        bound = one.bound()
        without, _ = _measure(r, k, m, 0, values.rounds)
        exchange = _EXCHANGE_MS / 1000
        times, hidden = _measure(r, k, m, exchange, values.rounds)
        step = spread(without)
        table.rows.append(
            {
                "r": r,
                "k": k,
                "m": m,
                "bound_ms": 1000 * bound,
                **spread_values("step_ms", step.times(1000)),
                "efficiency": bound / step.median,
                **spread_values("exchange_step_ms", spread(times).times(1000)),
                "hidden": hidden,
            }
        )


class _Timekeeper(Device):
    """A device that remembers when it worked."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[float, float]] = []

    def work(self, seconds: float) -> None:
        """See `Device`."""
        start = time.perf_counter()
        super().work(seconds)
        self.times.append((start, time.perf_counter()))


class Exchanging(keras.optimizers.SGD):
    """Changes nothing; waits before the update of each layer."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0.0)
        self._seconds = seconds
        self.works: list[Work] = []
        self.links: list[_Timekeeper] = []

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """See `keras.Optimizer`."""
        if self._seconds and "scale" in variable.name:  # one a layer
            self.links.append(_Timekeeper())
            # TensorFlow does not keep a function alive while a graph calls it.
            self.works.append(Work(self.links[-1], self._seconds))
            gradient = self.works[-1](gradient)
        super().update_step(gradient, variable, learning_rate)


def _measure(
    r: int,
    k: int,
    m: int,
    exchange: float,
    rounds: int,
) -> tuple[list[float], float | None]:
    """Seconds of steps, and the share of the exchange that was hidden."""
    grid = [[_Timekeeper() for _ in range(k)] for _ in range(r)]
    layers = [
        Timed([row[i] for row in grid], _CELL_MS / 1000, is_first=i == 0)
        for i in range(k)
    ]
    with tfgpipe.PipelineStrategy(
        r, k, [f"CPU:{index}" for index in range(r * k)]
    ).scope():
        model = tfgpipe.GPipe(
            layers,
            num_micro_batches=m,
            layers_per_cell=[1] * k,
        )
        optimizer = Exchanging(exchange)
        model.compile(optimizer, "mse")
    # A row is the number of the replica that computes it.
    rows = np.repeat(np.arange(r, dtype=np.float32), m)[:, None]
    step = train_step(model, rows, rows)
    times, shares = [], []
    for turn in range(rounds + 2):
        for one in [*optimizer.links, *(d for row in grid for d in row)]:
            one.times.clear()
        taken = step()
        if turn > 1:  # the first ones trace, and warm up
            times.append(taken)
            shares.append(_hidden(grid, optimizer.links))
    return times, float(np.median(shares)) if exchange else None


def _hidden(grid: list[list[_Timekeeper]], links: list[_Timekeeper]) -> float:
    """The share of the exchange before the last task has ended."""
    end = max(d.times[-1][1] for row in grid for d in row)
    spans = [span for link in links for span in link.times]
    total = sum(stop - start for start, stop in spans)
    inside = sum(max(0.0, min(stop, end) - start) for start, stop in spans)
    return inside / total if total else 0.0
