"""Mini-batches that are not finite, and change nothing.

One loss or gradient of NaN or infinity would spread to all weights. Whether all
is finite is known only after the backward pass. So the layers' state and the
metrics are saved first, which costs nothing as long as they are not overwritten
in place, and restored; and the optimizer runs in a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import placement


def all_finite(loss: tf.Tensor, gradients: Iterable[Any]) -> tf.Tensor:
    """Whether a loss and all gradients are finite, a scalar.

    Nothing but a scalar leaves the device of a gradient.

    Args:
        loss: A scalar.
        gradients: Tensors, `tf.IndexedSlices`, or None.
    """
    by_device: dict[str, list[tf.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = getattr(gradient, "values", gradient)
            by_device.setdefault(values.device, []).append(_is_finite(values))
    found = [_is_finite(loss)]
    for device, flags in by_device.items():
        with tf.device(device or None):
            found.append(tf.reduce_all(tf.stack(flags)))
    return tf.reduce_all(tf.stack(found))


def _is_finite(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device or None):
        if tensor.dtype.is_complex:
            tensor = tf.abs(tensor)
        return tf.reduce_all(tf.math.is_finite(tensor))


class Skips(keras.layers.Layer):
    """How many mini-batches were skipped; a layer, so that files have it."""

    def __init__(self, device: str):
        super().__init__(name="skips")
        self._device = device
        with tf.init_scope(), tf.device(device):
            # Not tracked: neither weights nor metrics.
            self._counts = {
                name: tf.Variable(0, trainable=False, dtype=tf.int64)
                for name in ("epoch", "in_a_row", "total")
            }
        self.built = True

    @property
    def in_a_row(self) -> int:
        """Of the last mini-batches, up to now."""
        return int(self._counts["in_a_row"].numpy())

    @property
    def counts(self) -> list[tf.Variable]:
        """What holds all that it counts."""
        return [*self._counts.values()]

    @property
    def total_variable(self) -> tf.Variable:
        """What holds `total`."""
        return self._counts["total"]

    @property
    def total(self) -> int:
        """Of all mini-batches, those before the model was saved too."""
        return int(self._counts["total"].numpy())

    def start_epoch(self) -> None:
        """Counts from 0, as metrics do when an epoch begins."""
        self._counts["epoch"].assign(0)

    def add(self, finite: tf.Tensor) -> tf.Tensor:
        """Takes a mini-batch; returns how many the epoch had, a scalar."""
        with tf.device(self._device):
            one = tf.cast(tf.logical_not(finite), tf.int64)
            in_a_row = self._counts["in_a_row"]
            in_a_row.assign(one * (in_a_row + one))
            for name in ("epoch", "total"):
                self._counts[name].assign_add(one)
            return self._counts["epoch"].value()

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras to save."""
        store["total"] = self._counts["total"].numpy()

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras to load; files of others have no count."""
        if "total" in store.keys():  # noqa: SIM118 (it is no dictionary)
            self._counts["total"].assign(int(store["total"][()]))


class Guard:
    """Undoes a mini-batch that is not finite.

    Made when nothing was assigned yet.

    Args:
        variables: All that the mini-batch may assign but by the optimizer.
        skips: `Skips`, to count; None if there is no `end`.
    """

    def __init__(self, variables: Iterable[keras.Variable], skips: Any):
        self._skips = skips
        self._kept = []
        for variable in {id(v): v for v in variables}.values():
            with tf.device(variable.value.device):
                value = placement.read_variable(variable)
            self._kept.append((variable, value))
        self._finite: Any = None

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss: tf.Tensor,
        pairs: Iterable[tuple[Any, keras.Variable]],
        update: Callable[[], None],
    ) -> None:
        """Updates the weights if the mini-batch is finite.

        A loss scale falls if not, or the next mini-batches would not be finite
        either.

        Args:
            optimizer: The optimizer.
            loss: The loss, not scaled, a scalar.
            pairs: Gradients and their weights.
            update: Applies the gradients.
        """
        self._finite = all_finite(loss, [g for g, _ in pairs])
        tf.cond(
            self._finite,
            _no_result(update),
            _no_result(lambda: internals.lower_loss_scale(optimizer)),
        )

    def end(self) -> tf.Tensor:
        """Puts back what was kept, unless the mini-batch was finite.

        To be called when all is assigned.

        Returns:
            How many mini-batches were skipped, a scalar.
        """
        tf.cond(self._finite, tf.no_op, _no_result(self.put_back))
        return self._skips.add(self._finite)

    def put_back(self) -> None:
        """Gives the variables the values that they had."""
        for variable, value in self._kept:
            with tf.device(variable.value.device):
                variable.assign(value)


def _no_result(function: Callable[[], Any]) -> Callable[[], Any]:
    """A branch of `tf.cond` for its effects alone."""

    def branch() -> Any:
        function()
        return tf.no_op()

    return branch
