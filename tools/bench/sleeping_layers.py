"""Layers that wait inside TensorFlow, on any device of any process.

`timed_layers.Timed` waits in Python, in the process that made it. Here a data
set takes its time for its only element: operations of TensorFlow, which run
where the layer's cell is. They occupy none of its threads.

The tasks of a device must follow one another, as those of a schedule do: two
layers that wait at the same time both take what one takes.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Sleeping(keras.layers.Layer):
    """Returns its inputs, after a while; twice as long for the gradients.

    Args:
        seconds: For the forward pass.
        sizes: Of its weights, which training sends to and fro as those of
            other layers.
        is_first: Whether no layer before it has a weight. See
            `timed_layers.Timed`.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self,
        seconds: float,
        sizes: Sequence[int] = (1,),
        is_first: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._seconds = seconds
        self._sizes = tuple(sizes)
        self._is_first = is_first

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        self._own = [self.add_weight((size,), "zeros") for size in self._sizes]
        if self._is_first:
            self._offset = self.add_weight((), "zeros", name="offset")

    def call(self, inputs: Any) -> Any:
        """Waits; returns the inputs."""
        if self._is_first:
            inputs = inputs + self._offset
        return _slept(self._seconds, inputs, self._own)


class SleepingDense(keras.layers.Dense):
    """A dense layer whose product waits; twice as long for the gradients.

    Some of its columns take that share of the time.

    Args:
        units: Columns.
        seconds: For the forward pass of all.
        **kwargs: See `keras.layers.Dense`.
    """

    is_column_wise = True

    def __init__(self, units: int, seconds: float, **kwargs: Any) -> None:
        super().__init__(units, use_bias=False, **kwargs)
        self._seconds = seconds

    @property
    def kernel(self) -> Any:
        """The weights, when they have been waited for."""
        kernel = super().kernel
        share = kernel.shape[-1] / self.units
        return _slept(self._seconds * share, kernel, [])


def _slept(seconds: float, inputs: Any, variables: list[Any]) -> Any:
    @tf.custom_gradient
    def slept(inputs: Any, *weights: Any) -> Any:
        outputs = sleep(seconds, inputs)

        def gradient(dy: Any) -> list[Any]:
            # The output is needed: it may have to be computed again.
            dx = sleep(2 * seconds, dy, outputs)
            total = tf.reduce_sum(dx)
            return [dx, *(tf.fill(tf.shape(w), total) for w in weights)]

        return outputs, gradient

    return slept(inputs, *map(tf.convert_to_tensor, variables))


def sleep(seconds: float, *tensors: tf.Tensor) -> tf.Tensor:
    """Returns the first of the tensors; waits for all, and then some time.

    Args:
        seconds: How long.
        *tensors: Any.
    """
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    dtypes, shapes = [t.dtype for t in given], [t.shape for t in given]
    elements = tf.raw_ops.TensorDataset(components=given, output_shapes=shapes)
    elements = tf.raw_ops.SleepDataset(
        input_dataset=elements,
        sleep_microseconds=tf.constant(round(1e6 * seconds), tf.int64),
        output_types=dtypes,
        output_shapes=shapes,
    )
    # It would sleep again before it says that there are no more.
    elements = tf.raw_ops.TakeDataset(
        input_dataset=elements,
        count=tf.constant(1, tf.int64),
        output_types=dtypes,
        output_shapes=shapes,
    )
    return tf.raw_ops.DatasetToSingleElement(
        dataset=elements, output_types=dtypes, output_shapes=shapes
    )[0]
