"""The work in tfgpipe."""

import os
from collections.abc import Callable

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe.devices import local
from tools import devices
from tools.bench.models import TransformerBlock
from tools.bench.peer_programs import work


def build(order: work.Order) -> tuple[tfgpipe.GPipe, np.ndarray]:
    """Returns the pipeline, compiled, and its inputs."""
    x, sizes, cuts = work.inputs(), work.TRANSFORMER, order.cuts()
    blocks = [
        TransformerBlock(sizes.heads, sizes.hidden_units)
        for _ in range(sizes.blocks)
    ]
    model = tfgpipe.GPipe(
        [keras.Input(x.shape[1:]), *blocks],
        num_partitions=len(cuts),
        num_micro_batches=order.m,
        devices=devices.cpu_names(order.k),
        layers_per_cell=[stop - start for start, stop in cuts],
        schedule=order.schedule,
    )
    for block, values in zip(blocks, work.block_weights()):
        for variable, value in zip(block.weights, values.values()):
            variable.assign(value.reshape(variable.shape))
    model.compile(
        keras.optimizers.SGD(work.LEARNING_RATE),
        loss="mse",
        jit_compile=order.is_compiled,
    )
    return model, x


def train_step(model: tfgpipe.GPipe, x: np.ndarray) -> Callable[[], float]:
    """Makes a function that does a step of `fit` and returns its loss."""
    # The loss of all is the mean of the squares of the outputs.
    data = iter(tf.data.Dataset.from_tensors((x, np.zeros_like(x))).repeat())
    model.make_train_function()

    def step() -> float:
        model.reset_metrics()
        return float(model.train_function(data)["loss"])

    return step


def main() -> None:
    """Does what the command line says."""
    order = work.read_order()
    local.split_cpu(order.k)
    tf.config.threading.set_inter_op_parallelism_threads(order.k)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    model, x = build(order)
    work.serve(
        train_step(model, x),
        parameter_bytes=4 * model.count_params(),
        version=f"tensorflow {tf.__version__}, keras {keras.__version__}",
    )


if __name__ == "__main__":
    main()
