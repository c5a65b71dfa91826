r"""Measures this machine, for a report of a bug or of a new accelerator.

    tfgpipe report
    tfgpipe report --parts=machine
    tfgpipe report --output=two_gpus

It writes OUTPUT.json and OUTPUT.md, a page to paste: the machine; whether small
models have Keras's numbers, and the same bits in any number of cells; whether
they generate the same tokens; how fast the devices work beside one of them;
what they hold beside what a plan says. It takes some minutes. A part that is in
OUTPUT.json is not measured again: what was interrupted goes on.

All GPUs or TPU cores are used. One alone is cut into four logical devices, as
the CPU is where there is none: such devices share one processor, so that they
show whether numbers are right, not how fast several are.
"""

from __future__ import annotations

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
from tfgpipe.commands.progress import doing
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

FLAGS = command_line.new_flags()
flags.DEFINE_string(
    "output", "report", "Path of both files, without .json.", flag_values=FLAGS
)
flags.DEFINE_list(
    "parts",
    None,
    "Which parts, in this order. Default: all.",
    flag_values=FLAGS,
)
flags.DEFINE_boolean(
    "again", False, "Measure parts that there are, too.", flag_values=FLAGS
)


def run(values: flags.FlagValues) -> int:
    """Measures, writes and prints the page; returns the exit code."""
    names = values.parts or [*PARTS]
    for name in names:
        if name not in PARTS:
            raise command_line.BadFlags(
                f"--parts must be of {', '.join(PARTS)}. Received: {name!r}."
            )
    path = pathlib.Path(f"{values.output}.json")
    found: dict[str, Any] = {}
    if path.exists() and not values.again:
        found = json.loads(path.read_text("utf-8"))
    devices = _devices()
    for name in names:
        if name in found and "failed" not in found[name]:
            continue
        with doing(f"measuring {name}"):
            found[name] = _measured(PARTS[name], devices)
        write_text(path, json.dumps(found, indent=1, default=str) + "\n")
    text = page(found)
    write_text(path.with_suffix(".md"), text)
    print(text)
    return 1 if any("failed" in part for part in found.values()) else 0


def page(found: dict[str, Any]) -> str:
    """The report as Markdown: a table for each part."""
    lines = [f"# tfgpipe {VERSION} on this machine"]
    for name, rows in found.items():
        lines += ["", f"## {name.capitalize()}", "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("\n", " ").replace("|", "\\|")


def _measured(
    part: Callable[[list[str]], dict[str, Any]], devices: list[str]
) -> dict[str, Any]:
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models that are this small
            found = part(devices)
    except Exception as error:  # the page says it, and the others go on
        found = {"failed": f"{type(error).__name__}: {error}"}
    keras.backend.clear_session()
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def _devices() -> list[str]:
    """The devices of the cells; what is alone is cut into parts."""
    count = local.num_accelerators()
    if not count:
        local.split_cpu(NUM_PARTS)
        return [d.name for d in tf.config.list_logical_devices("CPU")]
    gpus = tf.config.list_physical_devices("GPU")
    if count == 1 and gpus:
        local.split_gpu(NUM_PARTS, PART_MIB)
    kind = "GPU" if gpus else "TPU"
    return [device.name for device in tf.config.list_logical_devices(kind)]


# ------------------------------------------------------------------ the parts
def _machine(devices: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tfgpipe": VERSION,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    build = tf.sysconfig.get_build_info()
    found |= {
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "CUDA, cuDNN": [build.get(f"{n}_version") for n in ("cuda", "cudnn")],
        "devices": devices,
    }
    for kind in ("GPU", "TPU"):
        for one in tf.config.list_physical_devices(kind):
            details = tf.config.experimental.get_device_details(one)
            found[one.name] = ", ".join(map(str, details.values()))
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES) and "KEY" not in name:
            found[name] = value
    return found


def _layers() -> list[Any]:
    layers: list[Any] = [keras.Input((32,))]
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


def _trained(model: keras.Model) -> list[np.ndarray]:
    """The weights after three mini-batches."""
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False
    )
    x, y = _rows((32,)), _rows((3,))
    model.fit(x, y, 24, epochs=3, shuffle=False, verbose=0)
    return [np.array(weight) for weight in model.get_weights()]


def _pipeline(
    devices: list[str], k: int, m: int, **arguments: Any
) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    model = tfgpipe.GPipe(_layers(), k, m, devices=devices, **arguments)
    return _trained(model)


def _furthest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def _numbers(devices: list[str]) -> dict[str, Any]:
    """Bits over K, schedules and remat; and how far Keras's weights are."""
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    with tf.device(devices[0]):
        expected = _trained(keras.Sequential(_layers()))
    found: dict[str, Any] = {}
    alone = _pipeline(devices[:1], 1, 1)
    found["furthest weight from Keras's, K = M = 1"] = _furthest(
        alone, expected
    )
    cases = [("gpipe", remat) for remat in REMAT]
    cases += [(name, "except_last") for name in SCHEDULES if name != "gpipe"]
    for name, remat in cases:
        chunks = CHUNKS[name] or 1
        one, other = (
            _pipeline(
                devices[:count], count * chunks, M, schedule=name, remat=remat
            )
            for count in (1, K)
        )
        furthest = _furthest(other, one)
        same = "the bits of one" if not furthest else f"{furthest:.2g} off"
        found[f"{name}, remat={remat}, {K} devices"] = same
    return found


def _checks(devices: list[str]) -> dict[str, Any]:
    """`tfgpipe.check` on three kinds of models."""
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
    found = {}
    for name, (model, x, y) in cases.items():
        pipeline: Any = tfgpipe.GPipe(model, K, M, devices=devices[:K])
        pipeline.compile("adam", "mse")
        report = tfgpipe.check(pipeline, x, y)
        found[name] = "as plain Keras" if report.is_exact else str(report)
    return found


def _generation(devices: list[str]) -> dict[str, Any]:
    """Tokens of a small GPT-2 on several devices, beside those of one."""
    try:
        from keras_hub import models
    except ImportError:
        return {"not measured": "KerasHub is not installed"}
    backbone = models.GPT2Backbone(
        vocabulary_size=50,
        num_layers=4,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=16,
    )
    task = models.GPT2CausalLM(backbone, preprocessor=None)
    task.compile(sampler="greedy")
    ids = np.random.default_rng(0).integers(1, 50, (4, 16))
    prompt = np.tile(np.arange(16) < 6, (4, 1))
    given = {"token_ids": ids * prompt, "padding_mask": prompt}
    with tf.device(devices[0]):
        expected = task.generate(given, stop_token_ids=None)
    pipeline = tfgpipe.GPipe(task, K, 2, devices=devices[:K])
    made = pipeline.generate(given, stop_token_ids=None)
    pairs = zip(np.array(made["token_ids"]), np.array(expected["token_ids"]))
    same = sum(np.array_equal(a, b) for a, b in pairs)
    return {"prompts with the tokens of one device": f"{same} of 4"}


def _seconds(model: Any, x: Any, y: Any) -> float:
    """Those of a step: how much longer a `fit` with more of them takes."""
    model.compile("sgd", "mse", jit_compile=False)
    batches = tf.data.Dataset.from_tensors((x, y)).cache().repeat()

    def fit(steps: int) -> float:
        started = time.monotonic()
        model.fit(batches.take(steps), shuffle=False, verbose=0)
        return time.monotonic() - started

    fit(2)
    few, many = (min(fit(steps) for _ in range(3)) for steps in (1, 11))
    return (many - few) / 10


def _speed(devices: list[str]) -> dict[str, Any]:
    """A step on all devices, and on one, of the same layers."""
    count = len(devices)
    units = 256 if "CPU" in devices[0] else 4096
    x, y = _rows((units,), 256), _rows((units,), 256)
    found: dict[str, Any] = {"rows, units, layers": [256, units, 2 * count]}
    for k in (1, count):
        layers = _equal_layers(units, 2 * count)
        model = tfgpipe.GPipe(layers, k, 16, devices=devices[:k])
        found[f"seconds of a step, K = {k}, M = 16"] = _seconds(model, x, y)
    one, all_ = [*found.values()][1:]
    found["times as fast"] = one / all_
    found["at most, by the schedule"] = count * 16 / (16 + count - 1)
    return found


def _memory(devices: list[str]) -> dict[str, Any]:
    """The most that devices held in a step, beside what is planned."""
    units, k = 4096, len(devices)
    layers = _equal_layers(units, 2 * k)
    held: Any = "not measured: TensorFlow counts the bytes of GPUs alone"
    if "GPU" in devices[0]:
        model: Any = tfgpipe.GPipe(layers, k, M, devices=devices)
        model.compile("adam", "mse")
        x = y = _rows((units,), 256)
        held = peak_mib(devices, lambda: model.fit(x, y, 256, verbose=0))
    planned = tfgpipe.plan(
        layers,
        256,
        machine="v100",
        optimizer="adam",
        setting={
            "num_partitions": k,
            "num_micro_batches": M,
            "devices": devices,
        },
    )
    expected = [size / 2**20 for size in planned.device_bytes]
    return {"MiB that devices held": held, "MiB by the plan": expected}


PARTS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "machine": _machine,
    "speed": _speed,
    "memory": _memory,
    "checks": _checks,
    "generation": _generation,
    # The last: TensorFlow's operations are deterministic from there on.
    "numbers": _numbers,
}
