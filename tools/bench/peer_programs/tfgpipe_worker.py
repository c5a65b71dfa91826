"""The work in tfgpipe.

    pip install '.[tensorflow]'

in the checkout, if it has not been done yet. `python -m tools.bench peers` runs
this program in its own Python. By itself:

    python -m tools.bench.peer_programs.tfgpipe_worker --work=A --variant=1f1b

A variant is "<schedule>,remat=<rule>,remat_groups=<number>,layers=keras,
jit_compile=yes" in one word, all but the first optional. The blocks of work A
are the ones that Lingvo computes, too; with "layers=keras" they are made of
Keras's layers.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe.devices import local
from tfgpipe.schedules import rule_of
from tools import devices
from tools.bench.models import ConvolutionBlock, TransformerBlock
from tools.bench.peer_programs import protocol, tensorflow_block, work
from tools.bench.waiting_layers import Device, Timed


class WrittenBlock(keras.layers.Layer):
    """A Transformer block in TensorFlow operations."""

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        self._named = {
            name: self.add_weight(shape=shape, name=name)
            for name, shape in work.block_shapes().items()
        }

    def call(self, x: Any) -> Any:
        """Computes the block."""
        values = {name: v.value for name, v in self._named.items()}
        return tensorflow_block.block(values, x)


def layers(order: protocol.Order) -> list[keras.layers.Layer]:
    """The layers of the work, with other weights."""
    if order.work == "A":
        sizes = work.TRANSFORMER
        return [
            TransformerBlock(sizes.heads, sizes.hidden_units)
            if order.options.get("layers") == "keras"
            else WrittenBlock()
            for _ in range(sizes.blocks)
        ]
    if order.work == "B":
        sizes = work.CONVOLUTIONS
        each = zip(sizes.channels, sizes.strides)
        return [ConvolutionBlock(*size) for size in each]
    return [
        Timed(Device(), work.FORWARD_SECONDS, is_first=k == 0)
        for k in range(order.k)
    ]


def weights(name: str) -> list[list[np.ndarray]]:
    """What the first variables of each layer of a work begin with."""
    if name == "A":
        return [list(each.values()) for each in work.block_weights()]
    return [[kernel] for kernel in work.kernels()] if name == "B" else []


def load(layer: keras.layers.Layer, values: list[np.ndarray]) -> None:
    """Gives a layer's first variables the values that all peers have."""
    for variable, value in zip(layer.weights, values):
        variable.assign(value.reshape(variable.shape))


def build(order: protocol.Order) -> tuple[tfgpipe.GPipe, np.ndarray]:
    """The pipeline, compiled, and its inputs."""
    x = work.inputs(order.work, order.m)
    made, options = layers(order), order.options
    groups = options.get("remat_groups")
    rule = options.get("remat", "except_last") if order.remat else "never"
    # Two cells a device, as the peers have.
    chunks = 2 if order.schedule == "interleaved" and order.k > 1 else 1
    cuts = work.cuts(order.work, order.k * chunks)
    model = tfgpipe.GPipe(
        [keras.Input(x.shape[1:]), *made],
        num_partitions=len(cuts),
        num_micro_batches=order.m,
        devices=devices.cpu_names(order.k),
        layers_per_cell=[stop - start for start, stop in cuts],
        schedule=order.schedule,
        remat=rule_of(rule),
        remat_groups=int(groups) if groups else None,
    )
    for layer, values in zip(made, weights(order.work)):
        load(layer, values)
    model.compile(
        keras.optimizers.SGD(work.LEARNING_RATES[order.work]),
        loss="mse",
        jit_compile=options.get("jit_compile") == "yes",
    )
    return model, x


def train_step(model: tfgpipe.GPipe, x: np.ndarray) -> Callable[[], float]:
    """Makes a function that does a step of `fit` and returns its loss."""
    # The peers' loss is the mean of the squares of the outputs.
    y = np.zeros((len(x), *model(x[:1]).shape[1:]), np.float32)
    data = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    model.make_train_function()

    def step() -> float:
        model.reset_metrics()
        return float(model.train_function(data)["loss"])

    return step


def main() -> None:
    """Does what the command line says."""
    order = protocol.order()
    local.split_cpu(order.k)
    # Work C sleeps in its threads.
    threads = 2 * order.k + 2 if order.work == "C" else order.k
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    model, x = build(order)
    sizes = [w.shape.num_elements() for w in model.trainable_variables]
    protocol.serve(
        train_step(model, x),
        parameter_bytes=4 * sum(sizes),
        version=f"tensorflow {tf.__version__}, keras {keras.__version__}",
    )


if __name__ == "__main__":
    main()
