"""Layers whose numbers hang on more than their plain attributes.

Two of them are equal in class and attributes, and compute something else: by
their name, which a special method reads, or by what a variable says.
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
class ByGetattr(Special):
    def __getattr__(self, key):
        if key == "factor":
            return factor_of(self.name)
        raise AttributeError(key)

    def factor_(self):
        return self.factor


@register
class ByMul(Special):
    def __mul__(self, other):
        return other * factor_of(self.name)

    def factor_(self):
        return self * 1.0


@register
class ByIter(Special):
    def __iter__(self):
        yield factor_of(self.name)

    def factor_(self):
        (found,) = self
        return found


@register
class ByEnter(Special):
    def __enter__(self):
        return factor_of(self.name)

    def __exit__(self, *_):
        return None

    def factor_(self):
        with self as found:
            return found


@register
class ByGetitem(Special):
    def __getitem__(self, _):
        return factor_of(self.name)

    def factor_(self):
        return self[0]


class _Descriptor:
    def __get__(self, instance, owner=None):
        return self if instance is None else factor_of(instance.name)


@register
class ByDescriptor(Special):
    number = _Descriptor()

    def factor_(self):
        return self.number


@register
class ByTemplate(Special):
    template = "%s"

    def __str__(self):
        return str(factor_of(self.name))

    def factor_(self):
        return float(self.template % self)


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
    "special_descriptor": ByDescriptor,
    "special_enter": ByEnter,
    "special_getattr": ByGetattr,
    "special_getitem": ByGetitem,
    "special_iter": ByIter,
    "special_mul": ByMul,
    "special_template": ByTemplate,
    "special_variable": ByVariable,
}
