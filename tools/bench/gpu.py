"""GPT-2 on one GPU, beside plain Keras: seconds of a step, and bytes.

whole: the GPU is one device. Keras, and pipelines of one cell.

split: the GPU is cut into --devices logical devices of --limit_mib each. Keras
on the first of them, and pipelines on all. They share the GPU's processor, so
that the seconds are no faster than on one; the bytes are those of real devices.

`MiB` is the most that each device held in a step, by TensorFlow's counters; a
CPU has none. `OOM` in the place of seconds: it does not fit.
"""

import gc
import time
from collections.abc import Iterator
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from absl import flags

import tfgpipe
from tfgpipe.commands.command_line import BadFlags
from tfgpipe.devices import local
from tfgpipe.monitor import peak_mib
from tools.bench.flags import define_choices, new_flags
from tools.report import Column, Report, Table, progress

FLAGS = new_flags(rounds=3)
define_choices(FLAGS, "part", ["whole"], ["whole", "split"], "One of them.")
flags.DEFINE_integer("devices", 4, "Of part split.", 2, flag_values=FLAGS)
flags.DEFINE_integer(
    "limit_mib", 8192, "Of each, in part split.", 1, flag_values=FLAGS
)
flags.DEFINE_integer("blocks", 12, "Of the model.", 1, flag_values=FLAGS)
flags.DEFINE_integer("units", 768, "Of the model.", 8, flag_values=FLAGS)
flags.DEFINE_integer("vocabulary", 50257, "Its words.", 2, flag_values=FLAGS)
flags.DEFINE_integer("rows", 32, "Of a mini-batch.", 8, flag_values=FLAGS)
flags.DEFINE_integer("tokens", 512, "Of each row.", 2, flag_values=FLAGS)
flags.DEFINE_integer("steps", 4, "In each round.", 1, flag_values=FLAGS)

COLUMNS = [
    Column("name", "what"),
    Column("k", "K"),
    Column("m", "M"),
    Column("first_s", "first s", ".1f"),
    Column("step_s", "step s"),
    Column("mib", "MiB"),
]
WHOLE: list[dict[str, Any]] = [
    {"num_micro_batches": 1},
    {"num_micro_batches": 8},
    {"num_micro_batches": 8, "remat": "never"},
    {"num_micro_batches": 8, "remat": "never", "head_parts": 4},
    {"num_micro_batches": 8, "remat": "offload"},
    {"num_micro_batches": 8, "remat": "never", "weights_on": "host"},
    {"num_micro_batches": 8, "remat": "always", "remat_groups": 12},
]
SPLIT: list[dict[str, Any]] = [
    {"num_micro_batches": 8},
    {"num_micro_batches": 16},
    {"num_micro_batches": 8, "schedule": "1f1b"},
    {"num_micro_batches": 8, "schedule": "1f1b", "remat": "never"},
    {"num_micro_batches": 8, "schedule": "1f1b", "remat": "offload"},
    {"num_micro_batches": 8, "head_parts": 4},
    {"num_micro_batches": 8, "weights_on": "host"},
    {"num_micro_batches": 8, "shards": {"token_embedding": 4}},
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    if len(values.part) != 1:
        raise BadFlags(
            "--part must be one of whole and split: a GPU is cut once in a "
            f"process. Received: {','.join(values.part)}."
        )
    is_split = values.part == ["split"]
    devices = _devices(values.devices if is_split else 1, values.limit_mib)
    title = f"GPT-2, {values.rows} rows of {values.tokens} tokens"
    table = report.add(Table(values.part[0], title, COLUMNS))
    rows = SPLIT if is_split else WHOLE
    for name, k, arguments in progress(list(_cases(rows, len(devices))), "gpu"):
        keras.backend.clear_session()
        gc.collect()  # the model before
        row = {"name": name, "k": k, "m": arguments.get("num_micro_batches")}
        table.rows.append(row | _measured(values, k, arguments, devices))


def _cases(
    rows: list[dict[str, Any]], k: int
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    yield "Keras", 0, {}
    for arguments in rows:
        others = [
            f"{name}={value!r}"
            for name, value in arguments.items()
            if name != "num_micro_batches"
        ]
        yield " ".join(["GPipe", *others]), k, arguments


def _devices(count: int, limit_mib: int) -> list[str]:
    """The first GPU, whole or in parts; a CPU where there is none."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and count > 1:
        local.split_gpu(count, limit_mib)
    elif gpus:
        tf.config.experimental.set_memory_growth(gpus[0], True)
    else:
        local.split_cpu(count)
    return [f"{'GPU' if gpus else 'CPU'}:{i}" for i in range(count)]


def _measured(
    values: flags.FlagValues,
    k: int,
    arguments: dict[str, Any],
    devices: list[str],
) -> dict[str, Any]:
    """Seconds and bytes of a model: plain Keras, or with `k` cells."""
    ids = np.random.default_rng(0).integers(
        0, values.vocabulary, (values.rows, values.tokens + 1)
    )
    mask = np.ones((values.rows, values.tokens), "int32")
    x, y = {"token_ids": ids[:, :-1], "padding_mask": mask}, ids[:, 1:]
    dataset = tf.data.Dataset.from_tensors((x, y)).cache().repeat()
    try:
        model = _model(values)
        if k:
            model = tfgpipe.GPipe(model, k, devices=devices, **arguments)
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        return _fitted(model, dataset, values, devices)
    except tf.errors.ResourceExhaustedError:
        return {"step_s": "OOM"}


def _model(values: flags.FlagValues) -> Any:
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=values.vocabulary,
        num_layers=values.blocks,
        num_heads=max(1, values.units // 64),
        hidden_dim=values.units,
        intermediate_dim=4 * values.units,
        max_sequence_length=values.tokens,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def _fitted(
    model: Any,
    dataset: tf.data.Dataset,
    values: flags.FlagValues,
    devices: list[str],
) -> dict[str, Any]:
    def fit(steps: int) -> float:
        started = time.monotonic()
        model.fit(dataset.take(steps), shuffle=False, verbose=0)
        return time.monotonic() - started

    first = fit(1)
    fit(2)
    seconds: list[float] = []

    def measure() -> None:
        seconds.extend(fit(values.steps) for _ in range(values.rounds))

    held = peak_mib(devices, measure)
    return {
        "first_s": first,
        "step_s": f"{min(seconds) / values.steps:.3f}",
        "mib": " ".join(f"{mib:,.0f}" for mib in held) or "-",
    }
