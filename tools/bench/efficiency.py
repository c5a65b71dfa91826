"""How near the schedules come to their own lower bounds.

Every cell is one layer that waits instead of computing: as long forward as for
the gradient of its input and for that of its weight. So any number of devices
can be measured on any machine. The bound is what the tasks of the schedule take
if nothing but the waiting takes time; `ratio` is the measured step to it. A
call of a waiting layer costs something by itself: `net` is the ratio to a bound
that includes it.

Under "interleaved", every device has two cells of half of the time.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfgpipe
from tfgpipe.devices import local
from tfgpipe.schedules import (
    CHUNKS,
    REMAT,
    SCHEDULES,
    Program,
    devices_of_cells,
)
from tools import devices
from tools.bench.models import train_step
from tools.bench.waiting_layers import (
    Device,
    Timed,
    call_cost,
    durations,
)
from tools.flags import define, new_flags
from tools.report import Report, Table, columns, progress, spread, spread_values

# Times of the cells, relative to --cell_ms, by index and number.
CELLS: dict[str, Callable[[int, int], float]] = {
    "equal": lambda index, count: 1,
    "uneven": lambda index, count: 2 if index == count // 2 else 1,
}

FLAGS = new_flags(rounds=5)
define(
    FLAGS,
    k=([2, 4, 8, 16], "Devices."),
    m=(
        ["k", "4k", "32"],
        "Micro-batches: numbers, or multiples of the number of devices.",
    ),
    cell_ms=([20.0], "Milliseconds of a forward task."),
    schedule=(SCHEDULES, "Schedules.", SCHEDULES),
    remat=(["except_last"], "What is recomputed.", REMAT),
    cells=(
        CELLS,
        "Whether cells take the same time; if uneven, the middle one takes "
        "twice as long as others.",
        CELLS,
    ),
)

COLUMNS = columns(
    "schedule | remat | cells | cell_ms: cell ms: g | k: K | m: M | "
    "bubble: bubble: .0% | bound_ms: bound ms: .1f | *step_ms: step ms: .1f | "
    "ratio: ratio: .3f | net_ratio: net: .3f | first_step_s: first step s: .1f"
)


class Setting(NamedTuple):
    """One row of the table.

    Attributes:
        schedule: Its name.
        remat: What is recomputed.
        cells: Name of the cells' relative times.
        cell_ms: Time of a cell's forward task.
        k: Devices.
        m: Micro-batches.
        chunks: Cells of a device.
    """

    schedule: str
    remat: str
    cells: str
    cell_ms: float
    k: int
    m: int
    chunks: int

    def seconds(self) -> list[float]:
        """Of the forward task of each cell."""
        count = self.k * self.chunks
        relative = [CELLS[self.cells](i, count) for i in range(count)]
        return [r * self.cell_ms / 1000 / self.chunks for r in relative]

    def program(self) -> Program:
        """What the devices run, recomputations included."""
        schedule = SCHEDULES[self.schedule](self.k, self.m, self.chunks)
        return schedule.program(self.remat)

    def bound(self, call_cost: float = 0) -> float:
        """Seconds of a step in which only the tasks take time."""
        return self.program().length(durations(self.seconds(), call_cost))

    def model(self) -> keras.Model:
        """A pipeline of layers that wait."""
        clocks = [Device() for _ in range(self.k)]
        places = devices_of_cells(self.schedule, self.k, self.chunks)
        layers = [
            Timed(clocks[places[index]], seconds, is_first=index == 0)
            for index, seconds in enumerate(self.seconds())
        ]
        return tfgpipe.GPipe(
            layers,
            num_partitions=len(layers),
            num_micro_batches=self.m,
            devices=devices.cpu_names(self.k),
            layers_per_cell=[1] * len(layers),
            schedule=self.schedule,
            remat=self.remat,
        )


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    settings = _settings(values)
    make_devices(max(values.k))
    shortest = {min(setting.seconds()) for setting in settings}
    costs = {seconds: call_cost(seconds) for seconds in {0.0, *shortest}}
    table = report.add(_table(values.rounds, costs))
    for setting in progress(settings, "efficiency"):
        first, times = measure(setting, values.rounds)
        seconds = setting.seconds()
        bound = setting.bound()
        net = setting.bound(costs[min(seconds)])
        step = spread(times)
        table.rows.append(
            {
                **setting._asdict(),
                "bubble": setting.program().bubble(durations(seconds)),
                "bound_ms": 1000 * bound,
                **spread_values("step_ms", step.times(1000)),
                "ratio": step.median / bound if bound else None,
                "net_ratio": step.median / net,
                "first_step_s": first,
            }
        )


def make_devices(num_devices: int) -> None:
    """Splits the CPU; every timed call blocks a thread."""
    local.split_cpu(num_devices)
    tf.config.threading.set_inter_op_parallelism_threads(2 * num_devices + 2)


def measure(setting: Setting, rounds: int) -> tuple[float, list[float]]:
    """Seconds of the first step, which traces, and of later ones."""
    model = setting.model()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    rows = np.ones((setting.m, 1), np.float32)
    step = train_step(model, rows, rows)
    first, _, *times = [step() for _ in range(rounds + 2)]
    return first, times


def _table(rounds: int, costs: dict[float, float]) -> Table:
    overheads = [
        f"{1e3 * seconds:g} ms: {1e6 * cost:.0f} us"
        for seconds, cost in sorted(costs.items())
    ]
    return Table(
        "efficiency",
        f"Steps of timed cells: median and quartiles of {rounds}, and the "
        "ratio to the schedule's bound",
        COLUMNS,
        notes=[
            "A timed call by itself, beside the waiting: "
            f"{', '.join(overheads)}."
        ],
    )


def _settings(values: flags.FlagValues) -> list[Setting]:
    found: list[Setting] = []
    for k in values.k:
        for m in dict.fromkeys(_micro_batches(text, k) for text in values.m):
            for schedule in values.schedule:
                chunks = CHUNKS[schedule] or 2
                found += [
                    Setting(schedule, remat, cells, cell_ms, k, m, chunks)
                    for cell_ms in values.cell_ms
                    for cells in values.cells
                    for remat in values.remat
                ]
    return found


def _micro_batches(text: str, num_devices: int) -> int:
    """The number that "32", "k" or "4k" stands for."""
    match = re.fullmatch(r"(\d*)(k?)", text)
    number = (
        int(match[1] or 1) * (num_devices if match[2] else 1) if match else 0
    )
    if not text or number < 1:
        raise ValueError(
            "--m must be positive integers, or multiples of the number of "
            f"devices such as 4k, with commas between them. Received: {text!r}."
        )
    return number
