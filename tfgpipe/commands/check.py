r"""Compares a training step of a pipeline with plain Keras.

    tfgpipe check --model=my_module:make_model --num_partitions=2 \
        --num_micro_batches=4
    tfgpipe check --model=train.py:make_model --num_partitions=4 \
        --num_micro_batches=8 --schedule=1f1b --inputs=int32[64] --num_ids=1000

One mini-batch of random rows goes through the pipeline, whose loss is the mean
square of the distance to random labels. Each layer is compared with the same
one on the host. Nothing is trained. Cells go to the accelerators; where there
is none, the CPU is split into as many devices. With data and a loss of your
own, call `tfgpipe.check`.

The exit code is 1 if something differs by more than rounding that the
documentation does not tell of.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from absl import flags
from keras import tree

import tfgpipe
from tfgpipe.commands import command_line, user_model
from tfgpipe.commands.progress import doing
from tfgpipe.devices import local
from tfgpipe.schedules import devices_for

FLAGS = command_line.new_flags()
user_model.define_model(FLAGS)
user_model.define_rows(FLAGS)
flags.DEFINE_integer(
    "num_partitions", None, "K, the number of cells.", 1, flag_values=FLAGS
)
flags.DEFINE_integer(
    "num_micro_batches",
    None,
    "M, the number of micro-batches.",
    1,
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "batch_size",
    None,
    "Rows of the mini-batch. Default: two a micro-batch.",
    1,
    flag_values=FLAGS,
)
command_line.define_schedule(FLAGS)
flags.DEFINE_string(
    "optimizer", "adam", "By its name in Keras.", flag_values=FLAGS
)


def run(values: flags.FlagValues) -> int:
    """Prints the report; returns the exit code."""
    command_line.require(values, "model", "num_partitions", "num_micro_batches")
    k, m = values.num_partitions, values.num_micro_batches
    if not local.has_accelerator():
        # Before the user's code makes a tensor.
        local.split_cpu(devices_for(values.schedule, k, k))
    keras.utils.set_random_seed(0)
    given = user_model.load(values)
    num_rows = values.batch_size or 2 * m
    x = user_model.random_rows(given.known_inputs(), num_rows, values.num_ids)
    with doing("checking"):
        model = tfgpipe.GPipe(
            given.layers, k, m, schedule=values.schedule, remat=values.remat
        )
        y = _labels(model(x))
        loss = tree.map_structure(lambda _: "mse", y)
        model.compile(values.optimizer, loss)
        report = tfgpipe.check(model, x, y)
    print(report)
    return 0 if report.is_exact else 1


def _labels(outputs: Any) -> Any:
    """Random numbers in the shape of the outputs."""
    generator = np.random.default_rng(1)
    return tree.map_structure(
        lambda one: generator.standard_normal(one.shape).astype("float32"),
        outputs,
    )
