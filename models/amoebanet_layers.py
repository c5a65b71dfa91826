"""The layers of AmoebaNet-D; `models.amoebanet` puts them together."""

from typing import Any

import keras
from keras import layers

from models import amoebanet_operations as operations

Shape = operations.Shape
ShapePair = tuple[Shape, Shape]
TensorPair = tuple[Any, Any]

# A step adds up two operations, each written (operation, state it reads).
# States 0 and 1 are the cell's inputs `h` and `h_prev`; step i makes state
# 2 + i. The output joins the channels of the states named last.
_NORMAL_STEPS = (
    (("conv_1x1", 1), ("max_pool_3x3", 1)),
    (("identity", 1), ("conv_1x7_7x1", 0)),
    (("conv_1x1", 0), ("conv_1x7_7x1", 0)),
    (("max_pool_3x3", 2), ("identity", 2)),
    (("avg_pool_3x3", 1), ("conv_1x1", 5)),
)
_NORMAL_OUTPUTS = (0, 3, 4, 6)
_REDUCTION_STEPS = (
    (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
    (("identity", 2), ("conv_3x3", 1)),
    (("conv_1x7_7x1", 2), ("max_pool_3x3", 2)),
    (("identity", 3), ("max_pool_2x2", 1)),
    (("avg_pool_3x3", 2), ("conv_1x1", 3)),
)
_REDUCTION_OUTPUTS = (4, 5, 6)


@keras.saving.register_keras_serializable("amoebanet")
class StemConv(layers.Layer):
    """ReLU, 3x3 convolution, batch normalization: an image to a first pair.

    Args:
        channels: Channels of the output.
        strides: Stride of the convolution, both ways.
        bn_momentum: As in `amoebanet_d`.
    """

    def __init__(
        self,
        channels: int,
        strides: int = 2,
        bn_momentum: float = 0.99,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.channels = channels
        self.strides = strides
        self.bn_momentum = bn_momentum
        make = operations.Factory(channels, bn_momentum, self.dtype_policy)
        self.conv = make.stem(strides)

    def build(self, input_shape: Shape) -> None:
        self.conv.build(input_shape)

    def call(self, inputs: Any, training: bool | None = None) -> TensorPair:
        h = self.conv(inputs, training=training)
        return h, h

    def compute_output_shape(self, input_shape: Shape) -> ShapePair:
        shape = tuple(self.conv.compute_output_shape(input_shape))
        return shape, shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "channels": self.channels,
            "strides": self.strides,
            "bn_momentum": self.bn_momentum,
        }


@keras.saving.register_keras_serializable("amoebanet")
class AmoebaNetCell(layers.Layer):
    """A normal or a reduction cell: `(h, h_prev)` to `(cell(h, h_prev), h)`.

    Args:
        channels: Channels of every state in the cell. A normal cell returns
            4 times, a reduction cell 3 times as many. A multiple of 4.
        reduction: Whether this cell halves height and width.
        after_reduction: Whether the cell before did, so that `h_prev` is
            twice as high and wide as `h`.
        bn_momentum: As in `amoebanet_d`.
    """

    def __init__(
        self,
        channels: int,
        reduction: bool = False,
        after_reduction: bool = False,
        bn_momentum: float = 0.99,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.channels = channels
        self.reduction = reduction
        self.after_reduction = after_reduction
        self.bn_momentum = bn_momentum
        self._steps = _REDUCTION_STEPS if reduction else _NORMAL_STEPS
        self._outputs = _REDUCTION_OUTPUTS if reduction else _NORMAL_OUTPUTS
        make = operations.Factory(channels, bn_momentum, self.dtype_policy)
        self.enter = make.operation("conv_1x1")
        self.enter_prev: layers.Layer | None = None  # depends on the input
        self.operations = [
            make.operation(name, 2 if reduction and state < 2 else 1)
            for step in self._steps
            for name, state in step
        ]

    def build(self, input_shape: ShapePair) -> None:
        shape, shape_prev = input_shape
        if self.enter_prev is None:
            self.enter_prev = self._make_enter_prev(shape_prev)
        self.enter.build(shape)
        self.enter_prev.build(shape_prev)
        for operation, read in zip(
            self.operations, self._shapes_read(input_shape), strict=True
        ):
            operation.build(read)

    def _make_enter_prev(self, shape_prev: Shape) -> layers.Layer:
        make = operations.Factory(
            self.channels, self.bn_momentum, self.dtype_policy
        )
        if self.after_reduction:
            return make.operation("identity", strides=2)
        if shape_prev[-1] != self.channels:
            return make.operation("conv_1x1")
        return make.operation("identity")

    def call(
        self, inputs: TensorPair, training: bool | None = None
    ) -> TensorPair:
        h, h_prev = inputs
        states = [
            self.enter(h, training=training),
            self.enter_prev(h_prev, training=training),
        ]  # 2 x (batch, height, width, channels)
        for i, ((_, a), (_, b)) in enumerate(self._steps):
            left, right = self.operations[2 * i : 2 * i + 2]
            states.append(
                left(states[a], training=training)
                + right(states[b], training=training)
            )
        outputs = [states[i] for i in self._outputs]
        return keras.ops.concatenate(outputs, axis=-1), h

    def _shapes_read(self, input_shape: ShapePair) -> list[Shape]:
        """Shape that each operation reads, in order."""
        states = self._state_shapes(input_shape)
        return [states[i] for step in self._steps for _, i in step]

    def _state_shapes(self, input_shape: ShapePair) -> list[Shape]:
        shape = (*input_shape[0][:-1], self.channels)
        small = (shape[0], _half(shape[1]), _half(shape[2]), shape[3])
        inside = small if self.reduction else shape
        return [shape, shape] + [inside] * len(self._steps)

    def compute_output_shape(self, input_shape: ShapePair) -> ShapePair:
        shape = self._state_shapes(input_shape)[-1]
        channels = self.channels * len(self._outputs)
        return (*shape[:-1], channels), tuple(input_shape[0])

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "channels": self.channels,
            "reduction": self.reduction,
            "after_reduction": self.after_reduction,
            "bn_momentum": self.bn_momentum,
        }


@keras.saving.register_keras_serializable("amoebanet")
class Classifier(layers.Layer):
    """Global average pooling of `h` and a dense layer; drops `h_prev`.

    Args:
        num_classes: Units of the dense layer.
        activation: Its activation; `None` for logits.
    """

    def __init__(
        self,
        num_classes: int,
        activation: str | None = "softmax",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.activation = activation
        policy = self.dtype_policy
        self.pool = layers.GlobalAveragePooling2D(
            data_format="channels_last", dtype=policy
        )
        self.dense = layers.Dense(num_classes, activation, dtype=policy)

    def build(self, input_shape: ShapePair) -> None:
        self.dense.build((input_shape[0][0], input_shape[0][-1]))

    def call(self, inputs: TensorPair) -> Any:
        h, _ = inputs
        return self.dense(self.pool(h))

    def compute_output_shape(self, input_shape: ShapePair) -> Shape:
        return (input_shape[0][0], self.num_classes)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "activation": self.activation,
        }


def _half(size: int | None) -> int | None:
    return None if size is None else (size + 1) // 2
