"""Models that benchmarks train, their data, and one step of training."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

from models import amoebanet


class BenchModel(NamedTuple):
    """What to train.

    Attributes:
        description: What it is, in a line.
        layers: Makes the layers, new ones each time.
        x_shape: Shape of an example.
        y_shape: Shape of its label.
        loss: As in `compile`.
        batch_size: Examples in a mini-batch.
    """

    description: str
    layers: Callable[[], list[kl.Layer]]
    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    loss: str
    batch_size: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """A mini-batch: random inputs, and labels that are zero."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.batch_size, *self.x_shape), np.float32)
        return x, np.zeros((self.batch_size, *self.y_shape), np.float32)

    def step(self, model: keras.Model) -> Callable[[], float]:
        """Compiles the model; see `train_step`."""
        model.compile(keras.optimizers.SGD(0.001), self.loss, jit_compile=False)
        return train_step(model, *self.data())


def train_step(model: keras.Model, x: Any, y: Any) -> Callable[[], float]:
    """A function that trains on the same data and returns the seconds.

    It does what `fit` does with a mini-batch. The first call also traces.
    """
    data = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    model.make_train_function()
    gc.collect()  # earlier models, which would be collected during a step

    def step() -> float:
        start = time.perf_counter()
        logs = model.train_function(data)
        float(logs["loss"])  # waits until everything is done
        return time.perf_counter() - start

    return step


# ----------------------------------------------------------------- the layers
class TransformerBlock(kl.Layer):
    """A pre-norm Transformer block.

    Args:
        num_heads: Heads of the attention.
        hidden_units: Units between the two dense layers.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self, num_heads: int, hidden_units: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._num_heads = num_heads
        self._hidden_units = hidden_units

    def build(self, input_shape: Any) -> None:
        """Creates the layers inside."""
        width = input_shape[-1]
        self._norms = [kl.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self._attention = kl.MultiHeadAttention(
            self._num_heads, width // self._num_heads
        )
        self._wide = kl.Dense(self._hidden_units, "relu")
        self._narrow = kl.Dense(width)
        for norm in self._norms:
            norm.build(input_shape)
        self._attention.build(input_shape, input_shape)
        self._wide.build(input_shape)
        self._narrow.build((*input_shape[:-1], self._hidden_units))

    def call(self, inputs: Any) -> Any:
        """Attention, then two dense layers, each around a shortcut."""
        x = self._norms[0](inputs)
        x = inputs + self._attention(x, x)
        return x + self._narrow(self._wide(self._norms[1](x)))


class ConvolutionBlock(kl.Layer):
    """A convolution, batch normalization, and ReLU.

    Args:
        filters: Channels of the outputs.
        strides: Of the convolution.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(self, filters: int, strides: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._convolution = kl.Conv2D(
            filters, 3, strides, padding="same", use_bias=False
        )
        self._norm = kl.BatchNormalization(momentum=0.9, epsilon=1e-5)

    def build(self, input_shape: Any) -> None:
        """Builds the layers inside."""
        self._convolution.build(input_shape)
        self._norm.build(self._convolution.compute_output_shape(input_shape))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Calls one after the other."""
        x = self._norm(self._convolution(inputs), training=training)
        return keras.ops.relu(x)


# ----------------------------------------------------------------- the models
def transformer(
    num_layers: int = 8, num_heads: int = 4, hidden_units: int = 1024
) -> list[kl.Layer]:
    """Makes Transformer blocks."""
    return [
        TransformerBlock(num_heads, hidden_units) for _ in range(num_layers)
    ]


def _convolutions() -> list[kl.Layer]:
    channels = [(16, 1), (16, 1), (32, 1), (32, 1), (64, 2)]
    channels += 3 * [(64, 1)] + [(128, 2)] + 3 * [(128, 1)]
    return [ConvolutionBlock(*each) for each in channels]


def _dense() -> list[kl.Layer]:
    units = 4 * [2048] + 4 * [1024] + 4 * [512]
    return [kl.Dense(count, "relu") for count in units]


def _softmax() -> list[kl.Layer]:
    blocks = transformer(num_layers=6, hidden_units=512)
    return [*blocks, kl.Dense(4096, "softmax")]


def _amoebanet() -> list[kl.Layer]:
    return amoebanet.amoebanet_d(6, 64, 10, stem_strides=1, stem_reductions=0)


MODELS = {
    "transformer": BenchModel(
        "8 Transformer blocks, 256 units, 4 heads, 1,024 hidden units, 64 "
        "positions",
        transformer,
        (64, 256),
        (64, 256),
        "mse",
        32,
    ),
    "amoebanet": BenchModel(
        "AmoebaNet-D (6, 64) on images of 32 x 32",
        _amoebanet,
        (32, 32, 3),
        (),
        "sparse_categorical_crossentropy",
        32,
    ),
    "convolutions": BenchModel(
        "12 convolutions with batch normalization and ReLU, 16 to 128 "
        "channels, on images of 32 x 32",
        _convolutions,
        (32, 32, 3),
        (8, 8, 128),
        "mse",
        64,
    ),
    "dense": BenchModel(
        "12 dense layers with ReLU, of 2,048 to 512 units",
        _dense,
        (1024,),
        (512,),
        "mse",
        256,
    ),
    "softmax": BenchModel(
        "6 Transformer blocks, 128 units, 4 heads, 512 hidden units, 32 "
        "positions, and a softmax of 4,096 words",
        _softmax,
        (32, 128),
        (32,),
        "sparse_categorical_crossentropy",
        32,
    ),
}
