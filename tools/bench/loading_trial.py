"""Loads a preset of KerasHub on accelerators with little memory.

A task like Llama, whose largest variables are its two embeddings. Every trial
has processes of its own, as in `memory_trial`. Naive is KerasHub's own
`from_preset` on one accelerator.
"""

from __future__ import annotations

import multiprocessing
import pathlib
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tools.bench import memory_trial, memory_worker

_MIB = 2**20


class Preset(NamedTuple):
    """What to load.

    Attributes:
        folder: Of the preset.
        k: Accelerators and cells; 0 is KerasHub on one accelerator.
        limit_mib: What an accelerator may use above a process without a model;
            0 is no limit.
    """

    folder: str
    k: int
    limit_mib: float = 0


class Loaded(NamedTuple):
    """How a trial went, in MiB.

    Attributes:
        total: All variables.
        largest: The largest of them.
        share: Those of the accelerator that has most.
        above: The peak of an accelerator above what its variables take, where
            it is highest.
        host: The peak of the process that reads the files, above what it had.
    """

    total: float
    largest: float
    share: float
    above: float
    host: float


def make(folder: pathlib.Path, units: int, num_layers: int) -> None:
    """Writes a preset, by a process that ends with what it needed."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_make, args=(str(folder), units, num_layers)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("The preset could not be written; see above.")


def run(preset: Preset) -> Loaded | None:
    """Loads it; None if the memory does not suffice."""
    loaded, _ = memory_trial.tried(_load, preset)
    return loaded


def _make(folder: str, units: int, num_layers: int) -> None:
    from keras_hub import models

    backbone = models.LlamaBackbone(
        vocabulary_size=8 * units,
        num_layers=num_layers,
        num_query_heads=4,
        num_key_value_heads=4,
        hidden_dim=units,
        intermediate_dim=4 * units,
    )
    task = models.LlamaCausalLM(backbone, preprocessor=None)
    task.save_to_preset(folder)


def _load(preset: Preset, accelerators: list[Connection]) -> Loaded:
    import tensorflow as tf
    from keras_hub import models

    import tfgpipe

    names = [memory_worker.device(task) for task in range(len(accelerators))]
    bare = memory_worker.ask(accelerators, "rest")
    if preset.limit_mib:
        memory_worker.ask(accelerators, "limit", preset.limit_mib)
    found: list[Any] = []

    def load() -> None:
        options: dict[str, Any] = {"preprocessor": None}
        if preset.k:
            pipeline = tfgpipe.load_preset(
                "LlamaCausalLM",
                preset.folder,
                preset.k,
                1,
                devices=names,
                **options,
            )
            found.append(pipeline.model)
        else:
            with tf.device(names[0]):
                found.append(
                    models.LlamaCausalLM.from_preset(preset.folder, **options)
                )

    host = memory_worker.peak_of_one(load)
    peaks = memory_worker.ask(accelerators, "memory")
    variables = found[0].variables
    shares = [memory_trial.mib_on(variables, name) for name in names]
    return Loaded(
        sum(shares),
        max(4 * v.value.shape.num_elements() / _MIB for v in variables),
        max(shares),
        max(
            peak.peak - before.resident - share
            for peak, before, share in zip(peaks, bare, shares)
        ),
        host,
    )
