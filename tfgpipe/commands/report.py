r"""Measures this machine, for a report of a bug or of a new accelerator.

    tfgpipe report
    tfgpipe report --again

It writes report.json and report.md, a page to paste: the machine; whether small
models have Keras's numbers, and the same bits in any number of cells; whether
they generate the same tokens; how fast the devices work beside one of them;
what they hold beside what a plan says. It takes some minutes. A part that is in
report.json is not measured again: what was interrupted goes on.

All GPUs or TPU cores are used. One alone is cut into four logical devices, as
the CPU is where there is none: such devices share one processor, so that they
show whether numbers are right, not how fast several are.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
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

PACKAGES = ("numpy", "keras-hub", "jax")
# They change what TensorFlow, XLA and CUDA do.
VARIABLES = ("CUDA_", "KERAS_", "TF_", "TPU_", "XLA_")
NUM_PARTS = 4  # logical devices that one device is cut into
PART_MIB = 1792
K, M = 2, 4

Rows = dict[str, Any]  # of a table of the page

FLAGS = command_line.new_flags()
flags.DEFINE_boolean(
    "again", False, "Measure parts that there are, too.", flag_values=FLAGS
)


def run(values: flags.FlagValues) -> int:
    """Measures, writes and prints the page; returns the exit code."""
    path = pathlib.Path("report.json")
    measured: Rows = {}
    if path.exists() and not values.again:
        measured = json.loads(path.read_text("utf-8"))
    devices = _devices()
    for name, part in PARTS.items():
        if name in measured and "failed" not in measured[name]:
            continue
        with doing(f"measuring {name}"):
            measured[name] = _measured(part, devices)
        write_text(path, json.dumps(measured, indent=1, default=str) + "\n")
    text = page(measured)
    write_text(path.with_suffix(".md"), text)
    print(text)
    return 1 if any("failed" in part for part in measured.values()) else 0


def page(measured: Rows) -> str:
    """Returns the report as Markdown: a table for each part."""
    lines = [f"# tfgpipe {VERSION} on this machine"]
    for name, rows in measured.items():
        lines += ["", f"## {name.capitalize()}", "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("\n", " ").replace("|", "\\|")


def _measured(part: Callable[[list[str]], Rows], devices: list[str]) -> Rows:
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models that are this small
            rows = part(devices)
    except Exception as error:  # the page says it, and the others go on
        rows = {"failed": f"{type(error).__name__}: {error}"}
    keras.backend.clear_session()
    return {**rows, "seconds": round(time.monotonic() - started, 1)}


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
    build = tf.sysconfig.get_build_info()
    rows: Rows = {
        "tfgpipe": VERSION,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "CUDA, cuDNN": [build.get(f"{n}_version") for n in ("cuda", "cudnn")],
        "devices": devices,
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows[name] = importlib.metadata.version(name)
    for device in tf.config.list_physical_devices():
        if device.device_type in ("GPU", "TPU"):
            details = tf.config.experimental.get_device_details(device)
            rows[device.name] = ", ".join(map(str, details.values()))
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES) and "KEY" not in name:
            rows[name] = value
    return rows


def _layers() -> list[keras.Layer | keras.KerasTensor]:
    layers = [keras.Input((32,))]
    for _ in range(2):
        layers += [
            keras.layers.Dense(32, "gelu"),
            keras.layers.LayerNormalization(),
            keras.layers.Dropout(0.1, seed=1),
        ]
    return [*layers, keras.layers.Dense(3)]


def _equal_layers(units: int, count: int) -> list[Any]:
    layers = [keras.layers.Dense(units, "relu") for _ in range(count)]
    return [keras.Input((units,)), *layers]


def _rows(shape: tuple[int, ...], num_rows: int = 24) -> np.ndarray:
    drawn = np.random.default_rng(0).standard_normal((num_rows, *shape))
    return drawn.astype("float32")


def _trained(
    make: Callable[[], keras.Model], device: str | None = None
) -> list[np.ndarray]:
    """Returns the weights after three mini-batches."""
    keras.utils.set_random_seed(0)
    with tf.device(device):
        model = make()
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False
        )
        x, y = _rows((32,)), _rows((3,))
        model.fit(x, y, 24, epochs=3, shuffle=False, verbose=0)
    return [np.array(weight) for weight in model.get_weights()]


def _furthest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def _numbers(devices: list[str]) -> Rows:
    """Compares bits over K, schedules and remat; and weights with Keras's."""
    tf.config.experimental.enable_op_determinism()

    def weights_of(num_devices: int, chunks: int, m: int, **kwargs: Any) -> Any:
        k, used = num_devices * chunks, devices[:num_devices]
        return _trained(
            lambda: tfgpipe.GPipe(_layers(), k, m, devices=used, **kwargs)
        )

    expected = _trained(lambda: keras.Sequential(_layers()), devices[0])
    rows: Rows = {
        "furthest weight from Keras's, K = M = 1": _furthest(
            weights_of(1, 1, 1), expected
        )
    }
    cases = [("gpipe", remat) for remat in REMAT]
    cases += [(name, "except_last") for name in SCHEDULES if name != "gpipe"]
    for name, remat in cases:
        one, several = (
            weights_of(count, CHUNKS[name] or 1, M, schedule=name, remat=remat)
            for count in (1, K)
        )
        furthest = _furthest(several, one)
        same = "the bits of one" if not furthest else f"{furthest:.2g} off"
        rows[f"{name}, remat={remat}, {K} devices"] = same
    return rows


def _checks(devices: list[str]) -> Rows:
    """Runs `tfgpipe.check` on three kinds of models."""
    words = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(50, 32)(words)
    for _ in range(3):
        x = x + keras.layers.MultiHeadAttention(2, 16)(x, x)
        x = keras.layers.LayerNormalization()(x)
    attention = keras.Model(words, keras.layers.Dense(50)(x))
    image = keras.Input((16, 16, 3))
    x = image
    for width in (8, 16, 16):
        x = keras.layers.Conv2D(width, 3, strides=2, padding="same")(x)
        x = keras.layers.GroupNormalization(4)(x)
        x = keras.layers.Activation("relu")(x)
    pooled = keras.layers.GlobalAveragePooling2D()(x)
    images = keras.Model(image, keras.layers.Dense(3)(pooled))
    ids = np.random.default_rng(0).integers(0, 50, (24, 16))
    cases = {
        "dense": (_layers(), _rows((32,)), _rows((3,))),
        "images": (images, _rows((16, 16, 3)), _rows((3,))),
        "attention": (attention, ids, _rows((16, 50))),
    }
    rows = {}
    for name, (model, x, y) in cases.items():
        pipeline: Any = tfgpipe.GPipe(model, K, M, devices=devices[:K])
        pipeline.compile("adam", "mse")
        report = tfgpipe.check(pipeline, x, y)
        rows[name] = "as plain Keras" if report.is_exact else str(report)
    return rows


def _generation(devices: list[str]) -> Rows:
    """Compares tokens of a small GPT-2 on several devices with one's."""
    try:
        from keras_hub import models
    except ImportError:
        return {"not measured": "KerasHub is not installed"}
    backbone = models.GPT2Backbone(50, 4, 2, 32, 64, max_sequence_length=16)
    task = models.GPT2CausalLM(backbone, preprocessor=None)
    task.compile(sampler="greedy")
    ids = np.random.default_rng(0).integers(1, 50, (4, 16))
    mask = np.tile(np.arange(16) < 6, (4, 1))
    prompts = {"token_ids": ids * mask, "padding_mask": mask}
    with tf.device(devices[0]):
        expected = task.generate(prompts, stop_token_ids=None)
    pipeline = tfgpipe.GPipe(task, K, 2, devices=devices[:K])
    texts = pipeline.generate(prompts, stop_token_ids=None)
    pairs = zip(np.array(texts["token_ids"]), np.array(expected["token_ids"]))
    same = sum(np.array_equal(a, b) for a, b in pairs)
    return {"prompts with the tokens of one device": f"{same} of 4"}


def _speed(devices: list[str]) -> Rows:
    """Times a step on all devices, and on one, of the same layers."""
    count = len(devices)
    units = 256 if "CPU" in devices[0] else 4096
    data = tf.data.Dataset.from_tensors(
        (_rows((units,), 256), _rows((units,), 256))
    )
    rows: Rows = {"rows, units, layers": [256, units, 2 * count]}
    seconds = []
    for k in (1, count):
        layers = _equal_layers(units, 2 * count)
        model: keras.Model = tfgpipe.GPipe(layers, k, 16, devices=devices[:k])
        model.compile("sgd", "mse", jit_compile=False)

        def fit(steps: int, model: keras.Model = model) -> float:
            batches = data.cache().repeat(steps)
            started = time.monotonic()
            model.fit(batches, shuffle=False, verbose=0)
            return time.monotonic() - started

        fit(2)
        few, many = (min(fit(n) for _ in range(3)) for n in (1, 11))
        seconds.append((many - few) / 10)
        rows[f"seconds of a step, K = {k}, M = 16"] = seconds[-1]
    rows["times as fast"] = seconds[0] / seconds[1]
    rows["at most, by the schedule"] = count * 16 / (16 + count - 1)
    return rows


def _memory(devices: list[str]) -> Rows:
    """Compares the most that devices held in a step with the plan."""
    units, k = 4096, len(devices)
    layers = _equal_layers(units, 2 * k)
    held: Any = "not measured: TensorFlow counts the bytes of GPUs alone"
    if "GPU" in devices[0]:
        model: keras.Model = tfgpipe.GPipe(layers, k, M, devices=devices)
        model.compile("adam", "mse")
        x = y = _rows((units,), 256)
        held = peak_mib(devices, lambda: model.fit(x, y, 256, verbose=0))
    setting = {
        "num_partitions": k,
        "num_micro_batches": M,
        "devices": devices,
    }
    planned = tfgpipe.plan(
        layers, 256, machine="v100", optimizer="adam", setting=setting
    )
    expected = [size / 2**20 for size in planned.device_bytes]
    return {"MiB that devices held": held, "MiB by the plan": expected}


PARTS: dict[str, Callable[[list[str]], Rows]] = {
    "machine": _machine,
    "speed": _speed,
    "memory": _memory,
    "checks": _checks,
    "generation": _generation,
    # The last: TensorFlow's operations are deterministic from there on.
    "numbers": _numbers,
}
