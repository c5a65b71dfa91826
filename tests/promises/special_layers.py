"""Layers whose numbers hang on more than their plain attributes.

Two of them are equal in class and attributes, and compute something else: by
their name, or by what a variable says.
"""

from __future__ import annotations

import keras
from keras import layers as kl
from own_layers import register


def factor_of(name: str) -> float:
    """A number for each name."""
    return 0.5 + sum(map(ord, name)) % 7 / 7


@register
class Special(kl.Layer):
    """Scales by a number that only its name tells."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale * self.factor_()

    def factor_(self):
        return factor_of(self.name)


@register
class Times(keras.constraints.Constraint):
    """Makes a weight smaller, by its own factor."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, w):
        return w * self.factor

    def get_config(self):
        return {"factor": self.factor}


@register
class ByConstraint(Special):
    """Calls the constraint of its weight."""

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(shape[-1],),
            initializer="ones",
            constraint=Times(factor_of(self.name)),
        )

    def call(self, x):
        return x * self.scale.constraint(self.scale)


@register
class ByVariable(Special):
    """Keeps the number at its weight."""

    def build(self, shape):
        super().build(shape)
        self.scale.number = factor_of(self.name)

    def factor_(self):
        return self.scale.number


CLASSES = {
    "special_name": Special,
    "special_constraint": ByConstraint,
    "special_variable": ByVariable,
}
