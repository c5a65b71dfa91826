"""Optimizers that do more than Keras's do."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

register = keras.saving.register_keras_serializable("promises")
RATE = 0.05


@register
class OwnApply(keras.optimizers.SGD):
    """Changes gradients where it applies them."""

    def apply(self, grads, trainable_variables=None):
        halves = [None if g is None else 0.5 * g for g in grads]
        return super().apply(halves, trainable_variables)


@register
class Twice(keras.optimizers.Adam):
    """Applies gradients twice, at two learning rates."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        self.learning_rate = 0.3 * RATE
        super().apply(grads, trainable_variables)
        self.learning_rate = RATE


@register
class OwnStep(keras.optimizers.Optimizer):
    """Momentum that grows with the count of steps; decays matrices."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.speeds = self.add_optimizer_variables(variables, "speed")

    def update_step(self, gradient, variable, learning_rate):
        rate = ops.cast(learning_rate, variable.dtype)
        count = ops.cast(self.iterations + 1, variable.dtype)
        speed = self.speeds[self._get_variable_index(variable)]
        old = speed * (1.0 - 1.0 / (count + 1.0))
        self.assign(speed, old + ops.cast(gradient, variable.dtype))
        decay = 0.1 if len(variable.shape) > 1 else 0.0
        self.assign_sub(variable, rate * (speed + decay * variable))

    def get_config(self):
        return super().get_config()


@register
class ByName(keras.optimizers.SGD):
    """Another step for biases."""

    def update_step(self, gradient, variable, learning_rate):
        if "bias" in variable.name:
            learning_rate = 2.0 * learning_rate
        super().update_step(gradient, variable, learning_rate)


@register
class Looking(keras.optimizers.SGD):
    """Keeps weights ahead of their averages, as schedule-free ones do."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.ahead = self.add_optimizer_variables(
            variables, "ahead", initializer="zeros"
        )

    def update_step(self, gradient, variable, learning_rate):
        ahead = self.ahead[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        share = 1.0 / ops.cast(self.iterations + 2, variable.dtype)
        self.assign_sub(ahead, rate * ops.cast(gradient, variable.dtype))
        self.assign(variable, (1 - share) * variable + share * ahead)


@register
class Squaring(keras.optimizers.SGD):
    """Its loss has another gradient than a multiple of the loss."""

    def scale_loss(self, loss):
        return loss * loss


@register
class Compressing(keras.optimizers.SGD):
    """Takes less of a large loss."""

    def scale_loss(self, loss):
        return ops.log(1.0 + ops.abs(loss))


def multiple(**options: Any) -> Any:
    """Momentum for matrices, Adam for biases."""
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(RATE, momentum=0.9),
            {".*bias": keras.optimizers.Adam(RATE)},
        )
    )


OWN: dict[str, Any] = {
    "ByName": ByName,
    "Looking": Looking,
    "MultiOptimizer": multiple,
    "OwnApply": OwnApply,
    "OwnStep": OwnStep,
    "Twice": Twice,
}
# Of a user, that scale the loss.
SCALING: dict[str, Any] = {"Compressing": Compressing, "Squaring": Squaring}
# Of Keras, in versions that have them.
NEW = ("Muon", "ScheduleFreeAdamW")
