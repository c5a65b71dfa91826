"""Predicted steps beside measured ones; cuts by seconds beside those by FLOPs.

Layers are measured one by one, on one device, while the other one trains: two
cores of a machine share its caches and its memory, and slow each other down, as
two accelerators do not. No setting is used to calibrate.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.devices import local
from tfgpipe.plans import Machine, Setting, SizedModel, predict
from tfgpipe.plans import sized as sized_model
from tfgpipe.sequence import source_of
from tools.bench import efficiency
from tools.bench.models import MODELS, BenchModel
from tools.report import Column, Table, alternated, columns, progress, spread


def compared_columns(unit: str) -> list[Column]:
    """Columns for `compared`."""
    return [
        Column(f"measured_{unit.lower()}", f"measured {unit}", ".1f"),
        Column(f"predicted_{unit.lower()}", "predicted", ".1f"),
        Column("error", "error", "+.1%"),
    ]


def compared(unit: str, measured: float, predicted: float) -> dict[str, float]:
    """The values of a row for `compared_columns`, in this unit."""
    return {
        f"measured_{unit.lower()}": measured,
        f"predicted_{unit.lower()}": predicted,
        "error": predicted / measured - 1,
    }


def with_errors(table: Table, what: str) -> Table:
    """Notes how large the errors of a table are."""
    errors = [abs(row["error"]) for row in table.rows]
    table.notes.append(
        f"Errors: median {statistics.median(errors):.1%}, worst "
        f"{max(errors):.1%}, of {len(errors)} {what}"
    )
    return table


_COLUMNS = [
    *columns("model | schedule | remat | k: K | m: M"),
    *compared_columns("ms"),
]
_CUTS = columns(
    "model | cut: cut by | layers: layers of cells | step_ms: step ms: .1f | "
    "ratio: / FLOPs: .3f"
)
SETTINGS = [
    ("gpipe", "never", 4),
    ("gpipe", "except_last", 8),
    ("gpipe", "always", 4),
    ("1f1b", "never", 8),
    ("1f1b", "except_last", 4),
    ("zero_bubble", "never", 4),
    ("zero_bubble", "except_last", 8),
    ("interleaved", "except_last", 4),
]
TIMED = [
    efficiency.Setting(schedule, remat, cells, 20, k, m, 1)
    for schedule, remat, cells, k, m in (
        ("gpipe", "except_last", "equal", 4, 8),
        ("1f1b", "never", "uneven", 8, 16),
        ("zero_bubble", "never", "equal", 8, 16),
        ("1f1b", "except_last", "equal", 16, 16),
        ("gpipe", "never", "uneven", 16, 32),
        ("zero_bubble", "except_last", "uneven", 4, 8),
    )
]


class Measured(NamedTuple):
    """A model of which layers are measured.

    Attributes:
        name: Its name.
        model: What is trained.
        profile: What its layers take.
        sized: What they need.
    """

    name: str
    model: BenchModel
    profile: Any
    sized: SizedModel

    def setting(
        self, schedule: str, remat: str, num_devices: int, k: int, m: int
    ) -> Setting:
        """A setting that is cut by the measured seconds."""
        workload = self.sized.by_profile(
            self.profile, self.model.batch_size / m
        )
        cut = tuple(self.sized.cut(workload.costs, k))
        return Setting(1, num_devices, cut, m, schedule, (remat,) * k)

    def predicted(
        self, setting: Setting, machine: Machine | None = None
    ) -> float:
        """Seconds of a step."""
        rows = self.model.batch_size / setting.num_micro_batches
        workload = self.sized.by_profile(self.profile, rows)
        return predict(workload, setting, machine).step_seconds


def tables(rounds: int, seconds: float) -> Iterator[Table]:
    """Steps of real models, and cuts of them."""
    local.split_cpu(2)
    table = Table(
        "steps",
        "Steps as predicted from layers that were measured one by one, and as "
        "measured: two devices of a core each",
        _COLUMNS,
    )
    models = [
        measure(name, MODELS[name], seconds)
        for name in progress(MODELS, "layers")
    ]
    runs = list(itertools.product(models, SETTINGS))
    for model, setting in progress(runs, "steps"):
        table.rows.append(_row(model, *setting, rounds))
    yield with_errors(table, "settings")
    yield _cuts(models, rounds)


def waiting(rounds: int) -> Iterator[Table]:
    """Steps of cells that wait, on up to 16 devices."""
    efficiency.make_devices(16)
    table = Table(
        "waiting",
        "Steps of cells that wait instead of computing, as predicted from "
        "layers that were measured one by one, and as measured",
        _COLUMNS,
    )
    for setting in progress(TIMED, "waiting cells"):
        table.rows.append(_timed_row(setting, rounds))
    yield with_errors(table, "settings")


def measure(name: str, model: BenchModel, seconds: float) -> Measured:
    """Measures the layers on one device while the other one trains."""
    with _training_beside(model):
        return measure_alone(name, model, seconds, (1, 8, 32))


def measure_alone(
    name: str, model: BenchModel, seconds: float, parts: Sequence[int]
) -> Measured:
    """Measures the layers on one device."""
    layers = [keras.Input(model.x_shape), *model.layers()]
    x, y = model.data(model.batch_size)
    profile = tfgpipe.profile(
        layers,
        x,
        y,
        loss=model.loss,
        micro_batch_sizes=[model.batch_size // m for m in reversed(parts)],
        device="CPU:0",
        seconds=seconds,
        optimizer="sgd",
        verbose=0,
    )
    return Measured(
        name, model, profile, sized_model(source_of(layers), None, "sgd")
    )


@contextlib.contextmanager
def _training_beside(model: BenchModel) -> Iterator[None]:
    """Inside, the other device trains such a model."""
    pipeline = tfgpipe.GPipe(
        [keras.Input(model.x_shape), *model.layers()],
        num_partitions=1,
        num_micro_batches=8,
        devices=["CPU:1"],
    )
    step = model.step(pipeline)
    step()  # traces
    has_ended = threading.Event()

    def train() -> None:
        while not has_ended.is_set():
            step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _row(
    own: Measured, schedule: str, remat: str, m: int, rounds: int
) -> dict[str, Any]:
    """A setting with two devices."""
    k = 4 if schedule == "interleaved" else 2
    setting = own.setting(schedule, remat, 2, k, m)
    expected = own.predicted(setting)
    measured = step_seconds(own.model, setting, rounds)
    return {
        "model": own.name,
        "schedule": schedule,
        "remat": remat,
        "k": k,
        "m": m,
        **compared("ms", 1e3 * measured, 1e3 * expected),
    }


def made_step(model: BenchModel, setting: Setting) -> Callable[[], float]:
    """A function that trains for a step, and returns its seconds."""
    pipeline = tfgpipe.GPipe(
        [keras.Input(model.x_shape), *model.layers()],
        num_partitions=setting.num_partitions,
        num_micro_batches=setting.num_micro_batches,
        devices=["CPU:0", "CPU:1"][: setting.num_devices],
        layers_per_cell=setting.layers_per_cell,
        schedule=setting.schedule,
        remat=setting.remat[0],
    )
    return model.step(pipeline)


def step_seconds(model: BenchModel, setting: Setting, rounds: int) -> float:
    """The median of some steps, after two."""
    step = made_step(model, setting)
    _, _, *times = [step() for _ in range(rounds + 2)]
    return spread(times).median


def _timed_row(setting: efficiency.Setting, rounds: int) -> dict[str, Any]:
    """Cells that wait, on as many devices."""
    model = setting.model()
    rows = np.ones((1, 1), np.float32)
    layers = [keras.Input((1,)), *model.sequence]
    profile = tfgpipe.profile(
        layers, rows, device="CPU:0", seconds=1.0, optimizer="sgd", verbose=0
    )
    sized = sized_model(source_of(layers), None, "sgd")
    k = setting.k
    planned = Setting(
        1, k, (1,) * k, setting.m, setting.schedule, (setting.remat,) * k
    )
    expected = predict(sized.by_profile(profile, 1), planned, None).step_seconds
    _, times = efficiency.measure(setting, rounds)
    measured = spread(times).median
    return {
        "model": f"waiting, {setting.cells}",
        "schedule": setting.schedule,
        "remat": setting.remat,
        "k": k,
        "m": setting.m,
        **compared("ms", 1e3 * measured, 1e3 * expected),
    }


def _cuts(models: list[Measured], rounds: int) -> Table:
    """One cut by FLOPs, one by seconds, and the best of those beside them."""
    table = Table(
        "cuts",
        "Steps of cuts into two cells: gpipe, M = 8, never recomputed; by "
        "hand: the fastest of the cuts up to two layers away",
        _CUTS,
    )
    for own in progress(models, "cuts"):
        sized = own.sized
        workload = sized.by_profile(own.profile, own.model.batch_size / 8)
        by_flops = tuple(sized.cut([s.flops for s in sized.sizes], 2))
        by_seconds = tuple(sized.cut(workload.costs, 2))
        count = len(sized.sizes)
        near = {
            (first + d, count - first - d)
            for first in (by_flops[0], by_seconds[0])
            for d in range(-2, 3)
            if 0 < first + d < count
        }
        times = {
            cut: step_seconds(
                own.model,
                Setting(1, 2, cut, 8, "gpipe", ("never",) * 2),
                rounds,
            )
            for cut in sorted(near)
        }
        best = min(times, key=times.__getitem__)
        for name, cut in (
            ("FLOPs", by_flops),
            ("seconds", by_seconds),
            ("hand", best),
        ):
            table.rows.append(
                {
                    "model": own.name,
                    "cut": name,
                    "layers": " ".join(map(str, cut)),
                    "step_ms": 1e3 * times[cut],
                    "ratio": times[cut] / times[by_flops],
                }
            )
    return table


_GRID_COLUMNS = columns(
    "model | chosen_by: chosen by | schedule | k: K | m: M | "
    "step_ms: step ms: .1f | predicted_ms: predicted: .1f | ratio: / best: .3f"
)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# So many of the fastest of the grid are measured once more, in turns with the
# plan: the fastest of many single measurements is partly luck.
_FINALISTS = 4
_MORE_ROUNDS = 4


def grid(rounds: int, seconds: float) -> Table:
    """Plans for each model, and measures what else could have been chosen."""
    local.split_cpu(2)
    found = Table(
        "grid",
        "The plan for two devices of a core each, and the best of a grid: one "
        "device or two, M up to 32, gpipe, 1f1b, interleaved, zero_bubble",
        _GRID_COLUMNS,
    )
    for name in progress(MODELS, "models"):
        own = measure(name, MODELS[name], seconds)
        found.rows += _grid_rows(own, rounds)
    worst = max(row["ratio"] for row in found.rows)
    found.notes.append(f"The plan takes at most {worst:.3f} of the best")
    return found


def _grid_rows(own: Measured, rounds: int) -> list[dict[str, Any]]:
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


_ONE_DEVICE_COLUMNS = [
    *columns("model | m: M"),
    *compared_columns("ms"),
]


def _embedding() -> list[kl.Layer]:
    # The data are standard normal numbers: ids around 10,000.
    return [
        kl.Rescaling(1000.0, 10_000.0),
        kl.Embedding(20_000, 256),
        kl.Dense(512, "relu"),
        kl.Dense(128),
    ]


_ONE_DEVICE_MODELS = {
    name: MODELS[name] for name in ("dense", "convolutions", "transformer")
} | {
    "embedding": BenchModel(
        "an embedding of 20,000 words in 256 units, and two dense layers",
        _embedding,
        (32,),
        (32, 128),
        "mse",
        128,
    )
}


def one_device(rounds: int, seconds: float) -> Table:
    """Profiles each model, and trains it with each number of micro-batches."""
    local.split_cpu(1)
    machine = _machine()
    found = Table(
        "one_device",
        "Steps of one device, a core, as predicted from layers that were "
        "measured one by one, and as measured",
        _ONE_DEVICE_COLUMNS,
    )
    for name, model in progress(_ONE_DEVICE_MODELS.items(), "models"):
        own = measure_alone(name, model, seconds, MICRO_BATCHES)
        settings = [
            own.setting("gpipe", "never", 1, 1, m) for m in MICRO_BATCHES
        ]
        steps = [made_step(model, setting) for setting in settings]
        for step in steps:
            step()  # traces
        for setting, times in zip(settings, alternated(steps, rounds, name)):
            measured = 1e3 * statistics.median(times)
            predicted = 1e3 * own.predicted(setting, machine)
            found.rows.append(
                {
                    "model": name,
                    "m": setting.num_micro_batches,
                    **compared("ms", measured, predicted),
                }
            )
    return with_errors(found, "settings")


def _machine() -> Machine:
    """This core's memory; nothing is sent, and no FLOPs are asked for."""
    x = tf.Variable(tf.ones([2**26]))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x.assign_add(x)
        times.append(time.perf_counter() - start)
    return Machine(1.0, 1.0, 2 * 2**28 / min(times), 1.0, name="this core")
