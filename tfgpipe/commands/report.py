r"""Measures this machine, for a report of a bug or of a new accelerator.

    tfgpipe report --output=report.md

The file is a page to paste: the machine; whether small models have Keras's
numbers, and the same bits in any number of cells; how fast the devices work
beside one of them; what they hold beside what a plan says. It takes some
minutes.

All GPUs or TPU cores are used. One alone is cut into four logical devices, as
the CPU is where there is none: such devices share one processor, so that they
show whether numbers are right, not how fast several are.
"""

from __future__ import annotations

import os
import pathlib
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfgpipe
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tfgpipe.devices import local
from tfgpipe.files import write_text
from tfgpipe.monitor import peak_mib
from tfgpipe.schedules import CHUNKS, REMAT, SCHEDULES
from tfgpipe.versions import VERSION

# They change what TensorFlow, XLA and CUDA do.
VARIABLES = ("CUDA_", "KERAS_", "TF_", "TPU_", "XLA_")
NUM_PARTS = 4  # logical devices that one device is cut into
PART_MIB = 1792
K, M = 2, 4

Rows = dict[str, Any]  # of a table of the page

FLAGS = command_line.new_flags()
flags.DEFINE_string(
    "output", "report.md", "The page to write.", flag_values=FLAGS
)


def run(values: flags.FlagValues) -> int:
    """Measures, writes and prints the page; returns the exit code."""
    path = pathlib.Path(values.output)
    devices = _devices()
    page, code = f"# tfgpipe {VERSION} on this machine\n", 0
    for name, part in PARTS.items():
        try:
            with doing(f"measuring {name}"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of models that are this small
                rows = part(devices)
        except Exception as error:  # the page says it, and the others go on
            rows, code = {"failed": f"{type(error).__name__}: {error}"}, 1
        keras.backend.clear_session()
        page += f"\n## {name.capitalize()}\n\n| | |\n| --- | --- |\n"
        for key, value in rows.items():
            text = str(value).replace("\n", " ").replace("|", "\\|")
            page += f"| {key} | {text} |\n"
        write_text(path, page)
    print(page)
    return code


def _devices() -> list[str]:
    """Returns the devices of the cells; one alone is cut into parts."""
    kind = next(
        (k for k in ("GPU", "TPU") if tf.config.list_physical_devices(k)), "CPU"
    )
    if kind == "CPU":
        local.split_cpu(NUM_PARTS)
    elif kind == "GPU" and len(tf.config.list_physical_devices(kind)) == 1:
        local.split_gpu(NUM_PARTS, PART_MIB)
    return [device.name for device in tf.config.list_logical_devices(kind)]


# ------------------------------------------------------------------ the parts
def _machine(devices: list[str]) -> Rows:
    rows: Rows = {
        "tfgpipe": VERSION,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "build": dict(tf.sysconfig.get_build_info()),
        "devices": devices,
    }
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device)
        if details:
            rows[device.name] = details
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES) and "KEY" not in name:
            rows[name] = value
    return rows


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def _speed(devices: list[str]) -> Rows:
    """Times a step on all devices, and on one; what they hold, and a plan."""
    count, m = len(devices), 16
    units = 256 if "CPU" in devices[0] else 4096
    data = tf.data.Dataset.from_tensors((_rows(256, units),) * 2)
    data = data.cache().repeat(10)
    rows: Rows = {"rows, units, layers": [256, units, 2 * count]}
    for k in (1, count):
        layers = [keras.layers.Dense(units, "relu") for _ in range(2 * count)]
        layers = [keras.Input((units,)), *layers]
        model: keras.Model = tfgpipe.GPipe(layers, k, m, devices=devices[:k])
        model.compile("adam", "mse", jit_compile=False)
        model.fit(data, shuffle=False, verbose=0)
        started = time.monotonic()
        held = peak_mib(devices, lambda: model.fit(data, verbose=0))  # noqa: B023
        seconds = (time.monotonic() - started) / 10
        rows[f"seconds of a step, K = {k}, M = {m}"] = f"{seconds:.4f}"
    ideal = count * m / (m + count - 1)
    rows["times as fast, by the schedule"] = f"{ideal:.2f}"
    setting = {"num_partitions": count, "num_micro_batches": m}
    plan = tfgpipe.plan(
        layers,
        256,
        devices=devices,
        machine="v100",
        optimizer="adam",
        setting=setting,
    )
    rows["MiB that GPUs held"] = [round(mib) for mib in held]
    planned = [round(size / 2**20) for size in plan.device_bytes]
    rows["MiB by the plan"] = planned
    return rows


def _model() -> keras.Model:
    """Makes a model of many kinds of layers."""
    image = keras.Input((16, 16, 3))
    x = keras.layers.Conv2D(32, 3, strides=2, activation="gelu")(image)
    x = keras.layers.Reshape((49, 32))(x)
    for _ in range(3):
        x = x + keras.layers.MultiHeadAttention(2, 16)(x, x)
        x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dropout(0.1, seed=1)(keras.layers.Flatten()(x))
    return keras.Model(image, keras.layers.Dense(3)(x))


def _numbers(devices: list[str]) -> Rows:
    """Compares a step with Keras's, and bits of several devices with one's."""
    x, y = _rows(24, 16, 16, 3), _rows(24, 3)

    def made(count: int, name: str, remat: str) -> keras.Model:
        keras.utils.set_random_seed(0)
        model: keras.Model = tfgpipe.GPipe(
            _model(),
            count * (CHUNKS[name] or 1),
            M,
            devices=devices[:count],
            schedule=name,
            remat=remat,
        )
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(sgd, "mse", jit_compile=False)
        return model

    report = tfgpipe.check(made(K, "gpipe", "except_last"), x, y)
    rows = {"a step": "as plain Keras" if report.is_exact else str(report)}
    # TensorFlow's operations are deterministic from here on.
    tf.config.experimental.enable_op_determinism()
    cases = [("gpipe", remat) for remat in REMAT]
    cases += [(name, "except_last") for name in SCHEDULES if name != "gpipe"]
    for name, remat in cases:
        weights = []
        for count in (1, K):
            model = made(count, name, remat)
            model.fit(x, y, 24, epochs=3, shuffle=False, verbose=0)
            weights.append(model.get_weights())
        furthest = max(float(np.abs(a - b).max()) for a, b in zip(*weights))
        same = f"{furthest:.2g} off" if furthest else "the bits of one"
        rows[f"{name}, remat={remat}, {K} devices"] = same
    return rows


PARTS: dict[str, Callable[[list[str]], Rows]] = {
    "machine": _machine,
    "speed": _speed,
    "numbers": _numbers,
}
