"""One process of `tools.bench recompute`: trains one model when asked to.

Uses one core, makes the model, does a first step, which traces, and then
answers as `step_worker` says.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tools.bench.step_worker import answer


class Job(NamedTuple):
    """What a process does.

    Attributes:
        way: "keras", which keeps everything; "recompute_grad"; the same with
            graphs "as written", so without TensorFlow's graph optimiser; or
            "gpipe".
        groups: Groups of blocks that are computed again by themselves.
        m: Micro-batches.
        layers: Transformer blocks.
        width: Units of a block.
        sequence: Positions in an example.
        batch_size: Examples in a mini-batch.
        remat: The rule of a `GPipe`.
        words: Of which each position's next one is to be found; 0 for a
            regression.
        head_parts: Into how many parts the rows go through the head.
    """

    way: str
    groups: int
    m: int
    layers: int
    width: int
    sequence: int
    batch_size: int
    remat: str | float = "always"
    words: int = 0
    head_parts: int = 1


def main(argv: list[str]) -> None:
    """Does what the only argument, a `Job` in JSON, says."""
    job = Job(**json.loads(argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    answer(_prepare(job))


def _prepare(job: Job) -> Callable[[], float]:
    # TensorFlow starts as many threads as there are cores: not earlier.
    from tools.bench.models import train_step

    return train_step(compiled(job), *data(job))


def compiled(job: Job) -> Any:
    """The model, ready to be trained."""
    import keras
    import tensorflow as tf

    off = {"disable_meta_optimizer": "as written" in job.way}
    tf.config.optimizer.set_experimental_options(off)
    keras.utils.set_random_seed(0)
    model = _model(job)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.001),
        loss if job.words else "mse",
        jit_compile=False,
    )
    return model


def data(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """A mini-batch."""
    shape = job.batch_size, job.sequence, job.width
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    if job.words:
        y = np.random.default_rng(1).integers(0, job.words, shape[:2], "int32")
        return x, y
    return x, np.zeros(shape, np.float32)


def _model(job: Job) -> Any:
    import keras
    import tensorflow as tf

    import tfgpipe
    from tools.bench.models import transformer

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

    blocks = transformer(job.layers, hidden_units=4 * job.width)
    if job.words:
        blocks.append(keras.layers.Dense(job.words))
    inputs = keras.Input((job.sequence, job.width))
    if job.way == "keras":
        return keras.Sequential([inputs, *blocks])
    if job.way.startswith("recompute_grad"):
        ends = [job.layers * g // job.groups for g in range(job.groups + 1)]
        groups = [blocks[a:b] for a, b in itertools.pairwise(ends)]
        return keras.Sequential([inputs, *map(Recomputed, groups)])
    return tfgpipe.GPipe(
        [inputs, *blocks],
        num_partitions=1,
        num_micro_batches=job.m,
        devices=["CPU:0"],
        remat=job.remat,
        remat_groups=job.groups,
        head_parts=job.head_parts,
    )


if __name__ == "__main__":
    main(sys.argv)
