"""The work in Lingvo's GPipe: `PipeliningLayer`, in a session of TensorFlow 1.

    python3 -m venv LINGVO
    LINGVO/bin/pip install tensorflow-cpu==2.21.0
    LINGVO/bin/pip install --no-deps lingvo==0.14.2
    LINGVO/bin/pip install sympy sentencepiece matplotlib etils

Without --no-deps come several packages that a pipeline does not use. Then
`python -m tools.bench peers --lingvo_python=LINGVO/bin/python` runs this
program there. By itself, in a checkout of tfgpipe:

    LINGVO/bin/python -m tools.bench.peer_programs.lingvo_worker --work=A

Devices are parts of the CPU, with a thread each. Lingvo computes everything
again in the backward pass, except with one cell and one micro-batch, where it
keeps everything: there is no choice.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from tools.bench.peer_programs import (
    lingvo_operations,
    protocol,
    tensorflow_block,
    work,
)

_IS_REPLACED = lingvo_operations.replace_if_absent()

import lingvo.compat as tf  # type: ignore[import-not-found]
import numpy as np
import tensorflow.compat.v1 as tf1
from absl import flags, logging
from lingvo.core import (  # type: ignore[import-not-found]
    base_layer,
    bn_layers,
    cluster_factory,
    gpipe,
    layers,
    py_utils,
    tshape,
)


class Block(base_layer.BaseLayer):
    """A Transformer block."""

    def _CreateLayerVariables(self) -> None:
        super()._CreateLayerVariables()
        for name, shape in work.block_shapes().items():
            self.CreateVariable(name, _zeros(shape))

    def FProp(self, theta: Any, x: Any) -> Any:
        """Computes the block."""
        return tensorflow_block.block(theta, x)

    @classmethod
    def FPropMeta(cls, params: Any, shape: Any) -> Any:
        """The shape stays."""
        return _meta(shape)

    def first_values(self, index: int) -> list[tuple[Any, np.ndarray]]:
        """The variables of the layer of a number, and what they begin with."""
        weights = work.block_weights()[index]
        return [(self.vars[name], value) for name, value in weights.items()]


class Convolution(base_layer.BaseLayer):
    """A convolution, batch normalisation, and ReLU, of Lingvo's layers."""

    @classmethod
    def Params(cls) -> Any:
        """Adds the sizes."""
        params = super().Params()
        params.Define("kernel_shape", None, "(3, 3, inputs, outputs).")
        params.Define("stride", 1, "Of the convolution.")
        return params

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        shape, stride = self.params.kernel_shape, self.params.stride
        self.CreateChild(
            "convolution",
            layers.Conv2DLayerNoPadding.Params().Set(
                filter_shape=shape, filter_stride=(stride, stride)
            ),
        )
        self.CreateChild(
            "norm",
            bn_layers.BatchNormLayerNoPadding.Params().Set(
                dim=shape[-1], decay=work.MOMENTUM, epsilon=work.EPSILON
            ),
        )

    def FProp(self, theta: Any, x: Any) -> Any:
        """Calls one after the other."""
        x = self.convolution.FProp(theta.convolution, x)
        return tf.nn.relu(self.norm.FProp(theta.norm, x))

    @classmethod
    def FPropMeta(cls, params: Any, shape: Any) -> Any:
        """The shape of the outputs."""
        examples, rows, columns, _ = shape
        size = [rows // params.stride, columns // params.stride]
        return _meta(tshape.Shape([examples, *size, params.kernel_shape[-1]]))

    def first_values(self, index: int) -> list[tuple[Any, np.ndarray]]:
        """The variables of the layer of a number, and what they begin with."""
        return [(self.convolution.vars.w, work.kernels()[index])]


class Wait(base_layer.BaseLayer):
    """Returns its inputs, after a while."""

    def _CreateLayerVariables(self) -> None:
        super()._CreateLayerVariables()
        self.CreateVariable("weight", _zeros((1,)))

    def FProp(self, theta: Any, x: Any) -> Any:
        """Waits, and again for the gradients."""

        @tf.custom_gradient
        def timed(x: Any, weight: Any) -> Any:
            y = _after(work.FORWARD_SECONDS, x)

            def gradient(dy: Any) -> tuple[Any, Any]:
                # Needs the outputs, so that they have to be recomputed.
                dx = _after(work.BACKWARD_SECONDS, dy + 0 * y)
                return dx, tf.reshape(tf.reduce_sum(dx), weight.shape)

            return y, gradient

        return timed(x, theta.weight)

    @classmethod
    def FPropMeta(cls, params: Any, shape: Any) -> Any:
        """The shape stays."""
        return _meta(shape)

    def first_values(self, index: int) -> list[tuple[Any, np.ndarray]]:
        """None, as it does not matter."""
        return []


def _zeros(shape: tuple[int, ...]) -> Any:
    zero = py_utils.WeightInit.Constant(0.0)
    return py_utils.WeightParams(shape, zero, tf.float32)


def _meta(shape: Any) -> Any:
    return py_utils.NestedMap(flops=1, out_shapes=(shape,))


def _after(seconds: float, x: Any) -> Any:
    def wait(values: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return values

    # Without state: with it, all would wait for each other.
    y = tf.numpy_function(wait, [x], tf.float32, stateful=False)
    y.set_shape(x.shape)
    return y


def _layer(name: str, index: int) -> Any:
    """The description of a layer."""
    if name == "A":
        params = Block.Params()
    elif name == "B":
        params = Convolution.Params().Set(
            kernel_shape=work.kernels()[index].shape,
            stride=work.CONVOLUTIONS.strides[index],
        )
    else:
        params = Wait.Params()
    return params.Set(name=f"layer{index}")


def pipeline(order: protocol.Order) -> Any:
    """The layers in cells."""
    cells = [
        gpipe.FeatureExtractionLayer.Params().Set(
            name=f"cell{cell}",
            sub=[_layer(order.work, index) for index in range(*cut)],
        )
        for cell, cut in enumerate(work.cuts(order.work, order.k))
    ]
    params = gpipe.PipeliningLayer.Params()
    params.Set(name="pipeline", num_micro_batches=order.m, cell_tpl=cells)
    return params.Instantiate()


def _inside(layer: Any) -> Iterator[Any]:
    """The layers inside of a layer, at any depth."""
    for child in layer.children.Flatten():
        yield child
        yield from _inside(child)


def _loss(model: Any, x: Any) -> Any:
    """Computed where the last cell is."""
    outputs = model.FPropDefaultTheta(x)
    if isinstance(outputs, (tuple, list)):  # of one cell
        (outputs,) = outputs
    with tf.device(model.cluster.WorkerDeviceInModelSplit(-1)):
        return tf.reduce_mean(tf.square(outputs))


def _update(order: protocol.Order, model: Any, loss: Any) -> Any:
    """Gradient descent, and the moving averages of batch normalisation."""
    variables = tf.trainable_variables()
    gradients = tf.gradients(loss, variables)
    rate = work.LEARNING_RATES[order.work]
    descent = tf.train.GradientDescentOptimizer(rate)
    averages = [
        layer.PostTrainingStepUpdate()
        for layer in _inside(model)
        if isinstance(layer, bn_layers.BatchNormLayerNoPadding)
    ]
    applied = descent.apply_gradients(zip(gradients, variables))
    return tf.group(applied, *averages)


def train_step(order: protocol.Order) -> Callable[[], float]:
    """Makes a function that does a step and returns its loss."""
    values = work.inputs(order.work, order.m)
    cluster = cluster_factory.ForTestingWorker(
        mode="sync", job="trainer_client", cpus=order.k, split_size=order.k
    )
    graph = tf.Graph()
    with graph.as_default(), cluster:
        py_utils.GetOrCreateGlobalStepVar()
        model = pipeline(order)
        x = tf.placeholder(tf.float32, values.shape)
        loss = _loss(model, x)
        update = _update(order, model, loss)
        session = _session(order, graph)
        session.run(tf.global_variables_initializer())
        for layer in _inside(model):
            if isinstance(layer, (Block, Convolution)):
                index = int(layer.params.name.removeprefix("layer"))
                for variable, value in layer.first_values(index):
                    variable.load(value, session)
    run = session.make_callable([loss, update], feed_list=[x])
    return lambda: float(run(values)[0])


def _session(order: protocol.Order, graph: Any) -> Any:
    # Work C sleeps in its threads.
    waiting = 2 * order.k + 2 if order.work == "C" else order.k
    config = tf1.ConfigProto(
        device_count={"CPU": order.k},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=waiting,
        use_per_session_threads=False,
    )
    return tf1.Session(graph=graph, config=config)


def main() -> None:
    """Does what the command line says."""
    order = protocol.order()
    is_plain = order.k == order.m == 1
    if order.work != "C" and order.remat == is_plain:
        sys.exit(
            "Lingvo recomputes always, except with one cell and one "
            f"micro-batch. Received: {' '.join(order.words())}."
        )
    flags.FLAGS(sys.argv[:1])  # Lingvo reads flags of its own
    logging.set_verbosity(logging.ERROR)
    protocol.serve(
        train_step(order),
        version=f"lingvo 0.14.2, tensorflow {tf1.__version__}",
        operations="replaced" if _IS_REPLACED else "native",
    )


if __name__ == "__main__":
    main()
