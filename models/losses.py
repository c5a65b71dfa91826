"""Losses of text models."""

from typing import Any, ClassVar

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="models")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross entropy of logits with integer labels, smoothed.

    The values are those of `keras.losses.CategoricalCrossentropy` with
    `from_logits=True` and the same `label_smoothing` on one-hot labels: with V
    classes and smoothing s, the loss of logits z and label y is

        (1 - s) (logsumexp(z) - z[y]) + s (logsumexp(z) - mean(z))

    With smoothing, the labels are spread over all classes, one micro-batch at a
    time. That is one operation forward and backward, and takes half the time of
    this formula.

    Padding is told by `sample_weight`, of the labels' shape, 0 where there is
    padding. With the default reduction it then does not count at all.

    Args:
        label_smoothing: s, the share of the probability that goes to all
            classes alike. From 0 to below 1.
        reduction: As in `keras.losses.Loss`.
        name: Name of the loss.
        dtype: As in `keras.losses.Loss`.

    Attributes:
        is_row_wise: The loss of a batch is a sum over rows, divided by a
            number that is one, too.

    Raises:
        ValueError: If `label_smoothing` is out of range.

    Example:

    >>> loss = SmoothedCrossentropy(label_smoothing=0.1)
    >>> logits = ops.array([[[0.0, 0.0], [0.0, 9.0]]])
    >>> f"{float(loss(ops.array([[1, 0]]), logits, ops.array([[1, 0]]))):.4f}"
    '0.6931'

    Reference: [Szegedy et al., 2016](https://arxiv.org/abs/1512.00567),
    section 7
    """

    is_row_wise: ClassVar[bool] = True

    def __init__(
        self,
        label_smoothing: float = 0.0,
        reduction: str | None = "mean_with_sample_weight",
        name: str = "smoothed_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                "`label_smoothing` must be from 0 to below 1. "
                f"Received: label_smoothing={label_smoothing}."
            )
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Computes the losses.

        Args:
            y_true: Labels (batch, ...), integers or whole floats.
            y_pred: Logits (batch, ..., classes).

        Returns:
            Tensor of the labels' shape.
        """
        labels = ops.cast(y_true, "int32")
        if not self.label_smoothing:
            return ops.sparse_categorical_crossentropy(
                labels, y_pred, from_logits=True
            )
        num_classes = y_pred.shape[-1]
        s = self.label_smoothing
        spread = ops.one_hot(labels, num_classes, dtype=y_pred.dtype)
        spread = (1 - s) * spread + s / num_classes
        return ops.categorical_crossentropy(spread, y_pred, from_logits=True)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
            "dtype": self.dtype,
        }
