"""How near the schedules come to their own lower bounds.

Every cell is one layer that waits instead of computing: as long forward as for
the gradient of its input and for that of its weight. So any number of devices
can be measured on any machine. The bound is what the tasks of the schedule take
if nothing but the waiting takes time; `ratio` is the measured step to it. A
call of a waiting layer costs something by itself: `net` is the ratio to a bound
that includes it.

Under "interleaved", every device has --chunks cells of a --chunks-th of the
time.

Two more tables: one cell that is nothing but a layer which waits, and which
several devices compute in columns, by `shards`; and cells whose activations or
weights are on the host, over links that take a time of their own.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfgpipe
from tfgpipe.commands.command_line import BadFlags
from tfgpipe.devices import local
from tfgpipe.run import transfers
from tfgpipe.schedules import (
    CHUNKS,
    REMAT,
    SCHEDULES,
    Program,
    devices_of_cells,
)
from tools import devices
from tools.bench.memory import sent_by_shards
from tools.bench.models import train_step
from tools.bench.waiting_layers import (
    Device,
    SleepingDense,
    Timed,
    Work,
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
    table=(
        ["schedules", "shards", "host"],
        "Schedules; a layer on several devices; the memory of the host.",
        ["schedules", "shards", "host"],
    ),
    shards=([1, 2, 4], "Devices of the layer."),
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
    chunks=(2, "Cells of a device, if interleaved."),
)

COLUMNS = columns(
    "schedule | remat | cells | cell_ms: cell ms: g | k: K | m: M | "
    "bubble: bubble: .0% | bound_ms: bound ms: .1f | *step_ms: step ms: .1f | "
    "ratio: ratio: .3f | net_ratio: net: .3f | first_step_s: first step s: .1f"
)
SHARDS = columns(
    "shards | cell_ms: layer ms: g | m: M | *step_ms: step ms: .1f | "
    "speedup: times as fast: .2f | sent_mib: sent MiB/step: .1f"
)
HOST = columns(
    "arguments | schedule | k: K | cells | m: M | cell_ms: cell ms: g | "
    "link_ms: link ms: g | *step_ms: step ms: .1f | ratio: / without: .3f | "
    "held: micro-batches held"
)
# What is on the host, by which schedules, chunks of a device, and the time that
# it takes on its way, relative to a cell's.
ON_HOST: list[tuple[dict[str, Any], str, int, float]] = [
    ({"remat": "offload"}, "gpipe", 1, 0.5),
    ({"remat": "offload"}, "1f1b", 1, 0.5),
    ({"weights_on": "CPU:0"}, "breadth_first", 8, 0.25),
    ({"weights_on": "CPU:0"}, "interleaved", 8, 0.25),
]
_UNITS, _ROWS = 512, 64  # of the layer; of a micro-batch
_K = 4  # devices, if something is on the host


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

    def model(self, **arguments: Any) -> keras.Model:
        """A pipeline of layers that wait; `arguments` are `GPipe`'s."""
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
            **{"remat": self.remat, **arguments},
        )


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    settings = _settings(values)
    make_devices(max([*values.k, *values.shards, _K]))
    if "schedules" in values.table:
        _schedules(values, settings, report)
    if "shards" in values.table:
        _shards(values, report)
    if "host" in values.table:
        _host(values, report)


def _schedules(
    values: flags.FlagValues, settings: list[Setting], report: Report
) -> None:
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


def _shards(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "shards",
            f"A layer of {_UNITS} to {_UNITS} units, one cell that does "
            f"nothing else, {_ROWS} rows a micro-batch: median and quartiles "
            f"of {values.rounds}",
            SHARDS,
            notes=[
                "layer: what all columns of a micro-batch wait, forward; twice "
                "as long back.",
                "sent: between devices, inputs, outputs and their gradients; "
                "from the host and back, weights and gradients. Here that "
                "takes next to no time.",
            ],
        )
    )
    for cell_ms in values.cell_ms:
        base = None
        for count in progress(values.shards, "shards"):
            m = 8
            step = spread(_times_of_shards(count, cell_ms, m, values.rounds))
            base = base or step.median
            table.rows.append(
                {
                    "shards": count,
                    "cell_ms": cell_ms,
                    "m": m,
                    **spread_values("step_ms", step.times(1000)),
                    "speedup": base / step.median,
                    # Without shards, all is on one device.
                    "sent_mib": sent_by_shards(
                        count, m * _ROWS, _UNITS, _UNITS, has_dx=False
                    )
                    if count > 1
                    else 0.0,
                }
            )


def _times_of_shards(
    count: int, cell_ms: float, m: int, rounds: int
) -> list[float]:
    names = devices.cpu_names(count)
    layer = SleepingDense(_UNITS, cell_ms / 1000, name="wide")
    model = tfgpipe.GPipe(
        [keras.Input((_UNITS,)), layer],
        1,
        m,
        devices=names[:1],
        remat="never",
        shards={"wide": names} if count > 1 else None,
    )
    model.compile(keras.optimizers.SGD(0.0), "mse")
    rows = np.ones((m * _ROWS, _UNITS), np.float32)
    step = train_step(model, rows, rows)
    _, _, *times = [step() for _ in range(rounds + 2)]
    return times


def make_devices(num_devices: int) -> None:
    """Splits the CPU; every timed call blocks a thread."""
    local.split_cpu(num_devices)
    tf.config.threading.set_inter_op_parallelism_threads(2 * num_devices + 2)


def _host(values: flags.FlagValues, report: Report) -> None:
    table = report.add(
        Table(
            "host",
            "Steps of timed cells that have something on the host: median and "
            f"quartiles of {values.rounds}",
            HOST,
            notes=[
                "cell: a forward task; twice as long back. link: what a cell "
                "keeps of a micro-batch, or its weights, on their way.",
                "without: the same schedule with all on the devices, and "
                'remat="never"; steps in turns.',
                "held: by a device at most, and without.",
            ],
        )
    )
    k = _K
    for arguments, schedule, chunks, link in progress(ON_HOST, "host"):
        for cell_ms in values.cell_ms:
            m = 8
            own = cell_ms * chunks
            setting = Setting(schedule, "never", "equal", own, k, m, chunks)
            link_ms = link * cell_ms
            measured = _in_turns(setting, arguments, link_ms, values.rounds)
            without, step = map(spread, measured)
            table.rows.append(
                {
                    "arguments": ", ".join(
                        f"{name}={value!r}" for name, value in arguments.items()
                    ),
                    "schedule": schedule,
                    "k": k,
                    "cells": k * chunks,
                    "m": m,
                    "cell_ms": cell_ms,
                    "link_ms": link_ms,
                    **spread_values("step_ms", step.times(1000)),
                    "ratio": step.median / without.median,
                    "held": _held(setting, arguments),
                }
            )


def _held(setting: Setting, arguments: dict[str, Any]) -> str:
    if "remat" not in arguments:
        return "as without"
    remats = arguments["remat"], setting.remat
    found = [setting._replace(remat=r).program().held() for r in remats]
    return " of ".join(str(max(held)) for held in found)


def _in_turns(
    setting: Setting, arguments: dict[str, Any], link_ms: float, rounds: int
) -> list[list[float]]:
    """Seconds of steps without some arguments, and of steps with them."""
    links: dict[Any, Work] = {}  # by both ends, one tensor after the other

    def timed(values: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        ends = values[0].device, device
        link = links.setdefault(ends, Work(Device(), link_ms / 1000))
        with tf.device(device):
            first, *rest = [tf.identity(value) for value in values]
            # All of them are there when the first one is.
            first = link(first, *rest)
            with tf.control_dependencies([first]):
                return [first, *map(tf.identity, rest)]

    with contextlib.ExitStack() as stack:
        steps = [_step(setting, setting.model())]
        steps[0]()
        stack.enter_context(mock.patch.object(transfers, "send", timed))
        steps.append(_step(setting, setting.model(**arguments)))
        steps[1]()
    found: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for own, step in zip(found, steps):
            own.append(step())
    return [times[1:] for times in found]


def _step(setting: Setting, model: keras.Model) -> Callable[[], float]:
    model.compile(keras.optimizers.SGD(0.0), "mse")
    rows = np.ones((setting.m, 1), np.float32)
    return train_step(model, rows, rows)


def measure(setting: Setting, rounds: int) -> tuple[float, list[float]]:
    """Seconds of the first step, which traces, and of later ones."""
    step = _step(setting, setting.model())
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
                chunks = CHUNKS[schedule] or values.chunks
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
        raise BadFlags(
            "--m must be positive integers, or multiples of the number of "
            f"devices such as 4k, with commas between them. Received: {text!r}."
        )
    return number
