r"""Compares a training step of a pipeline with plain Keras.

    tfgpipe check --model=my_module:make_model --num_partitions=2 \
        --num_micro_batches=4

One mini-batch of random rows, two a micro-batch, goes through the pipeline,
whose loss is the mean square of the distance to random labels. Each layer is
compared with the same one on the host. Nothing is trained. Cells go to the
accelerators; where there is none, the CPU is split into as many devices. With
other data, losses and schedules, call `tfgpipe.check`.

The exit code is 1 if something differs by more than rounding that the
documentation does not tell of.
"""

from __future__ import annotations

import keras
import numpy as np
from absl import flags
from keras import tree

import tfgpipe
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tfgpipe.devices import local

FLAGS = command_line.new_flags()
command_line.define_model(FLAGS)
command_line.define_cells(FLAGS)


def run(values: flags.FlagValues) -> int:
    """Prints the report; returns the exit code."""
    command_line.require(values, "model", "num_partitions", "num_micro_batches")
    k, m = values.num_partitions, values.num_micro_batches
    if not local.has_accelerator():
        local.split_cpu(k)  # before the user's code makes a tensor
    keras.utils.set_random_seed(0)
    layers, inputs = command_line.load_model(values.model)
    x = command_line.random_rows(inputs, 2 * m)
    with doing("checking"):
        model: keras.Model = tfgpipe.GPipe(layers, k, m)
        generator = np.random.default_rng(1)
        y = tree.map_structure(
            lambda t: generator.standard_normal(t.shape).astype("float32"),
            model(x),
        )
        model.compile("adam", tree.map_structure(lambda _: "mse", y))
        report = tfgpipe.check(model, x, y)
    print(report)
    return 0 if report.is_exact else 1
