"""One process of `tools.bench throughput` and `recompute`: trains one model.

Restricts itself to some cores, makes the model, does a first step, which
traces, and then answers as `step_worker` says.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any, NamedTuple

from tools.bench.step_worker import answer


class Job(NamedTuple):
    """What a process does.

    Attributes:
        model: Name in `tools.bench.models.MODELS`, or "blocks", Transformer
            blocks of the sizes below.
        way: "gpipe"; of blocks also "keras", which keeps everything,
            "recompute_grad", or the same with graphs "as written", so without
            TensorFlow's graph optimiser.
        batch_size: Examples in a mini-batch.
        k: Devices, one core each.
        m: Micro-batches.
        schedule: As in `tfgpipe.GPipe`, as `remat` and `head_parts` are.
        remat: A rule.
        chunks: Cells of a device.
        jit: "on" if XLA compiles the cells, else "off".
        groups: Groups of blocks that are computed again by themselves; 0 for
            what is the default.
        head_parts: Into how many parts the rows go through the head.
        layers: Transformer blocks.
        width: Units of a block.
        sequence: Positions in an example.
        words: Of which each position's next one is to be found; 0 for a
            regression.
    """

    model: str
    way: str
    batch_size: int
    k: int = 1
    m: int = 1
    schedule: str = "gpipe"
    remat: str | float = "always"
    chunks: int = 1
    jit: str = "off"
    groups: int = 0
    head_parts: int = 1
    layers: int = 0
    width: int = 0
    sequence: int = 0
    words: int = 0


def main(argv: list[str]) -> None:
    """Does what the only argument, a `Job` in JSON, says."""
    job = Job(**json.loads(argv[1]))
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-job.k :])
    # TensorFlow starts as many threads as there are cores: not earlier.
    from tfgpipe.devices import local
    from tools.bench.models import train_step

    if job.model != "blocks":
        local.split_cpu(job.k)
    answer(train_step(*compiled(job)))


def compiled(job: Job) -> tuple[Any, Any, Any]:
    """Makes the model, ready to be trained, and a mini-batch."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tools.bench.models import MODELS, transformer

    keras.utils.set_random_seed(0)
    loss: Any = "mse"
    if job.model == "blocks":
        off = {"disable_meta_optimizer": "as written" in job.way}
        tf.config.optimizer.set_experimental_options(off)
        shape = job.batch_size, job.sequence, job.width
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        y = np.zeros(shape, np.float32)
        layers = transformer(job.layers, hidden_units=4 * job.width)
        if job.words:
            rng = np.random.default_rng(1)
            y = rng.integers(0, job.words, shape[:2], "int32")
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            layers.append(keras.layers.Dense(job.words))
    else:
        known = MODELS[job.model]
        x, y = known.data(job.batch_size)
        layers, loss = known.layers(), known.loss
    model = _model(job, [keras.Input(x.shape[1:]), *layers])
    model.compile(
        keras.optimizers.SGD(0.001), loss, jit_compile=job.jit == "on"
    )
    return model, x, y


def _model(job: Job, layers: list[Any]) -> Any:
    import keras
    import tensorflow as tf

    import tfgpipe

    class Recomputed(keras.layers.Layer):
        """Layers that are computed again in the backward pass."""

        def __init__(self, layers: list[keras.layers.Layer]) -> None:
            super().__init__()
            self.inner = keras.Sequential(layers)

        def build(self, shape: Any) -> None:
            """Builds the layers."""
            self.inner.build(shape)

        def call(self, x: Any) -> Any:
            """Keeps nothing but its inputs."""
            return tf.recompute_grad(self.inner)(x)

        def compute_output_shape(self, shape: Any) -> Any:
            """The blocks keep it."""
            return shape

    if job.way == "keras":
        return keras.Sequential(layers)
    if job.way.startswith("recompute_grad"):
        inputs, *blocks = layers
        ends = [job.layers * g // job.groups for g in range(job.groups + 1)]
        groups = [blocks[a:b] for a, b in itertools.pairwise(ends)]
        return keras.Sequential([inputs, *map(Recomputed, groups)])
    return tfgpipe.GPipe(
        layers,
        num_partitions=job.k * job.chunks,
        num_micro_batches=job.m,
        devices=[f"CPU:{index}" for index in range(job.k)],
        schedule=job.schedule,
        remat=job.remat,
        remat_groups=job.groups or None,
        head_parts=job.head_parts,
    )


if __name__ == "__main__":
    main(sys.argv)
