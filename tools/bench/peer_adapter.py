"""tfgpipe as one of the workers that `python -m tools.bench peers` compares.

Not run by hand. It speaks the protocol of `common.py`, a file of the folder
that --peers_dir names, which has to be on the Python path: sizes, weights and
data of the work, and the loop that answers "step" and "mem". A variant is
"<schedule>,remat=<rule>,remat_groups=<number>,layers=keras,jit_compile=yes",
all but the first optional.

The blocks of work A are written out in TensorFlow operations by `lm_raw.py` of
that folder, the file that gives Lingvo its blocks; with "layers=keras" they are
made of Keras's layers.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import common
import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe.devices import local
from tools import devices
from tools.bench.models import ConvolutionBlock, TransformerBlock
from tools.bench.timed_layers import Device, Timed

# The names of a block's weights in `common.py`, in our order.
_BLOCK = ("ln1_g ln1_b ln2_g ln2_b wq bq wk bk wv bv wo bo w1 b1 w2 b2").split()


class WrittenBlock(keras.layers.Layer):
    """A Transformer block in TensorFlow operations."""

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        shapes = common.lm_shapes()
        self._named = {
            name: self.add_weight(shape=shapes[name], name=name)
            for name in _BLOCK
        }

    def call(self, x: Any) -> Any:
        """Computes the block."""
        import lm_raw  # of the folder, as `common`; for work A alone

        values = {name: v.value for name, v in self._named.items()}
        return lm_raw.block(tf, values, x)


def blocks(
    from_keras: bool,
) -> tuple[list[keras.layers.Layer], list[Any], np.ndarray]:
    """Work A: layers, their weights, and inputs."""
    size = common.LM
    layers = [
        TransformerBlock(size["H"], size["F"]) if from_keras else WrittenBlock()
        for _ in range(size["L"])
    ]
    weights = [[w[name] for name in _BLOCK] for w in common.lm_weights()]
    return layers, weights, common.lm_data()


def convolutions() -> tuple[list[keras.layers.Layer], list[Any], np.ndarray]:
    """Work B: layers, their kernels, and inputs."""
    size = common.CNN
    layers = [
        ConvolutionBlock(*each) for each in zip(size["C"], size["STRIDE"])
    ]
    return layers, [[w] for w in common.cnn_weights()], common.cnn_data()


def timed(
    num_layers: int, num_micro_batches: int
) -> tuple[list[keras.layers.Layer], list[Any], np.ndarray]:
    """Work C: layers that wait, and inputs."""
    layers = [
        Timed(Device(), common.TIMED["FWD"], is_first=k == 0)
        for k in range(num_layers)
    ]
    return layers, [], np.ones((4 * num_micro_batches, 1), np.float32)


def load(layer: keras.layers.Layer, values: list[np.ndarray]) -> None:
    """Gives a layer's first variables the values that all peers have."""
    for variable, value in zip(layer.weights, values):
        variable.assign(value.reshape(variable.shape))


def build(arguments: Any) -> tuple[tfgpipe.GPipe, np.ndarray]:
    """The pipeline, compiled, and its inputs.

    Args:
        arguments: What `common.args` returns.
    """
    schedule, *options = arguments.variant.split(",")
    given = dict(option.split("=") for option in options)
    if arguments.workload == "A":
        layers, weights, x = blocks(given.get("layers") == "keras")
    elif arguments.workload == "B":
        layers, weights, x = convolutions()
    else:
        layers, weights, x = timed(arguments.K, arguments.M)
    remat = given.get("remat", "except_last") if arguments.remat else "never"
    # Two cells a device, as the peers have.
    chunks = 2 if schedule == "interleaved" and arguments.K > 1 else 1
    cuts = common.cuts(arguments.workload, arguments.K * chunks, arguments.cut)
    model = tfgpipe.GPipe(
        [keras.Input(x.shape[1:]), *layers],
        num_partitions=len(cuts),
        num_micro_batches=arguments.M,
        devices=devices.cpu_names(arguments.K),
        layers_per_cell=[stop - start for start, stop in cuts],
        schedule=schedule or "gpipe",
        remat=remat,
        remat_groups=int(given.get("remat_groups", 1)),
    )
    for layer, values in zip(layers, weights):
        load(layer, values)
    rate = common.LR[arguments.workload]
    model.compile(
        keras.optimizers.SGD(rate),
        loss="mse",
        jit_compile=given.get("jit_compile") == "yes",
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
    """Builds the work that the arguments describe, and serves it."""
    arguments = common.args()
    local.split_cpu(arguments.K)
    # Work C sleeps in its threads.
    waiting = 2 * arguments.K + 2 if arguments.workload == "C" else arguments.K
    threads = arguments.inter or waiting
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.threading.set_intra_op_parallelism_threads(arguments.intra)
    model, x = build(arguments)
    sizes = [w.shape.num_elements() for w in model.trainable_variables]
    common.serve(
        train_step(model, x),
        warm=arguments.warm,
        parameter_bytes=4 * sum(sizes),
        version=f"tensorflow {tf.__version__}, keras {keras.__version__}",
    )


if __name__ == "__main__":
    main()
