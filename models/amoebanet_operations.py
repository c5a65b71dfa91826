"""The operations inside of an AmoebaNet-D cell, made of Keras's layers."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

Shape = tuple[int | None, ...]  # (batch, height, width, channels)
Size = int | tuple[int, int]
Convolution = tuple[int, Size, Size]  # filters, kernel size, strides

_DATA_FORMAT = "channels_last"


class Factory:
    """Makes operations that return `channels` channels.

    Args:
        channels: Channels of every operation's output. Bottlenecks have a
            quarter of them.
        bn_momentum: Momentum of every batch normalization.
        dtype: The dtype policy of every layer made.
    """

    def __init__(
        self, channels: int, bn_momentum: float, dtype: keras.DTypePolicy
    ) -> None:
        self.channels = channels
        self.bn_momentum = bn_momentum
        self.dtype = dtype

    def operation(self, name: str, strides: int = 1) -> layers.Layer:
        """Makes the operation called `name`, as the cells' tables write it.

        Args:
            name: For example `"conv_3x3"`.
            strides: 1 or 2, both ways. `"identity"` with 2 is a factorized
                reduction.

        Returns:
            A layer: (batch, height, width, any or `channels`) to
            (batch, height / strides, width / strides, `channels`). Only
            convolutions take another number of channels than they return.
        """
        return getattr(self, f"_{name}")(strides)

    def stem(self, strides: int) -> layers.Layer:
        """Makes a 3x3 convolution without bottleneck."""
        return self._convolve((self.channels, 3, strides))

    def _identity(self, strides: int) -> layers.Layer:
        if strides == 1:
            return layers.Identity(dtype=self.dtype)
        return FactorizedReduction(
            self.channels, self.bn_momentum, dtype=self.dtype
        )

    def _conv_1x1(self, strides: int) -> layers.Layer:
        return self._convolve((self.channels, 1, strides))

    def _conv_3x3(self, strides: int) -> layers.Layer:
        narrow = self.channels // 4
        return self._convolve(
            (narrow, 1, 1), (narrow, 3, strides), (self.channels, 1, 1)
        )

    def _conv_1x7_7x1(self, strides: int) -> layers.Layer:
        narrow = self.channels // 4
        return self._convolve(
            (narrow, 1, 1),
            (narrow, (1, 7), (1, strides)),
            (narrow, (7, 1), (strides, 1)),
            (self.channels, 1, 1),
        )

    def _max_pool_2x2(self, strides: int) -> layers.Layer:
        return self._pool(layers.MaxPooling2D, 2, strides)

    def _max_pool_3x3(self, strides: int) -> layers.Layer:
        return self._pool(layers.MaxPooling2D, 3, strides)

    def _avg_pool_3x3(self, strides: int) -> layers.Layer:
        return self._pool(layers.AveragePooling2D, 3, strides)

    def _pool(self, kind: Any, size: int, strides: int) -> layers.Layer:
        return kind(
            size, strides, "same", data_format=_DATA_FORMAT, dtype=self.dtype
        )

    def _convolve(self, *convolutions: Convolution) -> layers.Layer:
        return ReluConvBN(convolutions, self.bn_momentum, dtype=self.dtype)


@keras.saving.register_keras_serializable("amoebanet")
class ReluConvBN(layers.Layer):
    """ReLU, convolution, batch normalization; several times in a row.

    Args:
        convolutions: For each repetition the filters, the kernel's size and
            the strides; the last two are a number or one for height and one
            for width.
        bn_momentum: Momentum of the batch normalizations.
    """

    def __init__(
        self,
        convolutions: Sequence[Convolution],
        bn_momentum: float = 0.99,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.convolutions = tuple(tuple(c) for c in convolutions)
        self.bn_momentum = bn_momentum
        policy = self.dtype_policy
        self.members: list[layers.Layer] = []
        for convolution in self.convolutions:
            self.members.append(layers.ReLU(dtype=policy))
            self.members.append(_conv(*convolution, dtype=policy))
            self.members.append(_batch_norm(bn_momentum, policy))

    def build(self, input_shape: Shape) -> None:
        for member in self.members:
            member.build(input_shape)
            input_shape = member.compute_output_shape(input_shape)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        x = inputs
        for relu, conv, bn in zip(
            *(self.members[i::3] for i in range(3)), strict=True
        ):
            x = bn(conv(relu(x)), training=training)
        return x

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        for member in self.members:
            input_shape = tuple(member.compute_output_shape(input_shape))
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "convolutions": self.convolutions,
            "bn_momentum": self.bn_momentum,
        }


@keras.saving.register_keras_serializable("amoebanet")
class FactorizedReduction(layers.Layer):
    """Halves height and width without losing three pixels out of four.

    ReLU, then two 1x1 convolutions with stride 2, of which the second sees
    the image shifted by one pixel both ways; their outputs joined and batch
    normalized.

    Args:
        channels: Channels of the output. Even.
        bn_momentum: Momentum of the batch normalization.
    """

    def __init__(
        self, channels: int, bn_momentum: float = 0.99, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.channels = channels
        self.bn_momentum = bn_momentum
        policy = self.dtype_policy
        self.relu = layers.ReLU(dtype=policy)
        self.conv = _conv(channels // 2, 1, 2, policy)
        self.conv_shifted = _conv(channels // 2, 1, 2, policy)
        self.bn = _batch_norm(bn_momentum, policy)

    def build(self, input_shape: Shape) -> None:
        self.conv.build(input_shape)
        self.conv_shifted.build(input_shape)
        self.bn.build(self.compute_output_shape(input_shape))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        x = self.relu(inputs)
        one_pixel = [[0, 0], [0, 1], [0, 1], [0, 0]]
        shifted = keras.ops.pad(x, one_pixel)[:, 1:, 1:, :]
        halves = [self.conv(x), self.conv_shifted(shifted)]
        # 2 x (batch, height / 2, width / 2, channels / 2)
        joined = keras.ops.concatenate(halves, axis=-1)
        return self.bn(joined, training=training)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (
            *self.conv.compute_output_shape(input_shape)[:-1],
            self.channels,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "channels": self.channels,
            "bn_momentum": self.bn_momentum,
        }


def _conv(
    filters: int,
    kernel_size: Size,
    strides: Size,
    dtype: keras.DTypePolicy,
) -> layers.Conv2D:
    """Makes a convolution as AmoebaNet has them: padded, without bias."""
    return layers.Conv2D(
        filters,
        kernel_size,
        strides,
        padding="same",
        data_format=_DATA_FORMAT,
        use_bias=False,
        kernel_initializer="he_normal",
        dtype=dtype,
    )


def _batch_norm(
    momentum: float, dtype: keras.DTypePolicy
) -> layers.BatchNormalization:
    """Makes a batch normalization over the channels."""
    return layers.BatchNormalization(axis=-1, momentum=momentum, dtype=dtype)
