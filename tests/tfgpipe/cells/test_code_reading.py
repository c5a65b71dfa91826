"""Which code can tell layers apart that have the same attributes."""

import collections
import dataclasses
import enum
import functools
import importlib
import itertools
import math
import pkgutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import models
import tfgpipe
from tfgpipe.cells.alike import likeness
from tfgpipe.cells.code_reading import Reading

SCALES = collections.defaultdict(itertools.count(1).__next__)
COUNTER = itertools.count(1)
SECOND = kl.Layer(name="second")
LAYERS = (SECOND,)
TEXT = "name"
NEXT = COUNTER.__next__
state = 0


class Mode(enum.Enum):
    DOUBLE = 2

    @property
    def factor(self):
        return self.value


@dataclasses.dataclass(frozen=True)
class Config:
    factor: float = 2.0
    units: tuple = (3, 4)

    def scaled(self, x):
        return x * self.factor


class Counting:
    n = 0

    def __call__(self):
        self.n += 1
        return self.n


class State:
    pass


COUNTING, CONFIG = Counting(), Config()


def by_name(layer):
    return SCALES[layer.name]


def indirectly(layer):
    return 2.0 * by_name(layer)


def by_path(layer):
    return len(layer.path)


def decorated(call):
    @functools.wraps(call)
    def wrapper(self, x):
        return call(self, x) * len(self.name)

    return wrapper


def counted(call, counter=COUNTER):
    def wrapper(self, x):
        return call(self, x) * next(counter)

    return wrapper


def counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


count = counter()


@functools.lru_cache
def cached(layer):
    return len(layer.name)


def in_place(seen=[]):  # noqa: B006
    seen.append(1)
    return len(seen)


def rebinding():
    global state
    state += 1
    return state


def of_class(layer):
    type(layer).calls = getattr(type(layer), "calls", 0) + 1
    return layer.calls


@tf.custom_gradient
def by_name_with_gradient(layer):
    return len(layer.name), lambda d: d


class Helper:
    def factor(self, layer):
        return len(layer.name)


HELPER = Helper()

UFUNC = np.frompyfunc(by_name, 1, 1)

# What a layer's call multiplies by; each may differ from layer to layer.
TELLING = {
    "table": lambda self: SCALES["a"],
    "name": lambda self: len(self.name),
    "helper": by_name,
    "helper_of_helper": indirectly,
    "path": by_path,
    "id": lambda self: id(self),
    "text": lambda self: len(str(self)),
    "format": lambda self: float(f"{self}"),
    "formatted": lambda self: float("{}".format(self)),  # noqa: UP032
    "percent": lambda self: float("%s" % self),  # noqa: UP031
    "repr": lambda self: len(repr(self)),
    "hash": lambda self: hash(self),
    "dict": lambda self: len(self.__dict__["_name"]),
    "vars": lambda self: vars(self)["_name"],
    "getattr": lambda self: len(getattr(self, "name")),  # noqa: B009
    "getattr_of_global": lambda self: len(getattr(self, TEXT)),
    "getattr_or": lambda self: len(getattr(self, TEXT, "x")),
    "self": lambda self: SCALES[self],
    "identity": lambda self: 2.0 if self is SECOND else 3.0,
    "in_tuple": lambda self: 2.0 if self in LAYERS else 3.0,
    "next": lambda self: next(COUNTER),
    "bound_next": lambda self: NEXT(),
    "nonlocal": lambda self: count(),
    "default": lambda self: in_place(),
    "global": lambda self: rebinding(),
    "object": lambda self: COUNTING(),
    "method": lambda self: HELPER.factor(self),
    "class_attribute": of_class,
    "cached": lambda self: cached(self),
    "gradient": lambda self: by_name_with_gradient(self),
    "random": lambda self: np.random.random(),  # noqa: NPY002
    "config": lambda self: len(self.get_config()["name"]),
    "unknown": lambda self: undefined(self),  # noqa: F821
    "comprehension": lambda self: next(len(la.name) for la in [self]),
    "ufunc": lambda self: UFUNC(self),
    "imported": lambda self: __import__("random").random(),
}


def layer_class(factor):
    class Times(kl.Layer):
        factor_of = factor

        def call(self, x):
            return x * self.factor_of()

    return Times


@pytest.mark.parametrize("name", TELLING)
def test_code_that_may_tell_layers_apart_is_told(name):
    assert Reading(TELLING[name]).reason
    assert Reading(layer_class(TELLING[name])).reason
    cls = layer_class(TELLING[name])
    assert likeness([cls()], []) != likeness([cls()], [])


@pytest.mark.parametrize("decorator", [decorated, counted])
def test_decorator_that_may_tell_layers_apart_is_told(decorator):
    class Decorated(kl.Layer):
        @decorator
        def call(self, x):
            return x

    assert Reading(Decorated).reason


@pytest.mark.parametrize("name", TELLING)
def test_function_in_an_attribute_is_read_too(name):
    function = TELLING[name]
    one, other = kl.Lambda(function), kl.Lambda(function)
    assert likeness([one], []) != likeness([other], [])


def checked(layer, x):
    if x.shape.rank != 2:
        raise ValueError(f"Layer {layer.name} takes matrices, not {x!r}.")
    return x


UNDERSTOOD = {
    "constant": lambda self, x: x * 2.0,
    "attribute": lambda self, x: x * self.factor,
    "library": lambda self, x: keras.ops.relu(x) + tf.tanh(x) * np.sqrt(2.0),
    "standard": lambda self, x: x * math.sqrt(2.0),
    "builtins": lambda self, x: sum(x for _ in range(len(x.shape))),
    "getattr": lambda self, x: x * getattr(self, "factor", 1.0),
    "errors": checked,
    "enum": lambda self, x: x * Mode.DOUBLE.factor,
    "object": lambda self, x: CONFIG.scaled(x),
    "helper": lambda self, x: positive(x),
    "partial": functools.partial(checked),
    "method": CONFIG.scaled,
    "closure": (lambda factor: lambda self, x: x * factor)(2.0),
    "function": tf.function(lambda x: x * 2.0),
    "gradient": tf.custom_gradient(lambda x: (x, lambda d: d)),
}


def positive(x):
    return keras.ops.where(x > 0, x, tf.zeros_like(x))


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_code_that_sees_nothing_but_attributes_is_understood(name):
    assert Reading(UNDERSTOOD[name]).reason is None


def test_layers_of_our_models_are_understood():
    """So that their cells share traces."""
    for module in pkgutil.walk_packages(models.__path__, "models."):
        for cls in vars(importlib.import_module(module.name)).values():
            if isinstance(cls, type) and issubclass(cls, kl.Layer):
                assert Reading(cls).reason is None


def test_method_that_no_call_leads_to_does_not_count():
    class Counts(kl.Layer):
        def call(self, x):
            return self.twice(x)

        def twice(self, x):
            return x * 2

        def description(self):
            return f"{self.name} at {id(self)}"

    assert Reading(Counts).reason is None
    assert {"twice"} <= Reading(Counts).mentioned


def test_what_keras_may_call_counts():
    class Cell(kl.LSTMCell):
        def get_initial_state(self, batch_size):
            return [keras.ops.ones((batch_size, len(self.name)))] * 2

    assert Reading(Cell).reason


def test_class_that_refers_to_itself_is_read_once():
    class Loop(kl.Layer):
        def call(self, x):
            return super().call(Loop.again(x))

        @staticmethod
        def again(x):
            return Loop if x is None else x

    assert Reading(Loop).reason is None


FACTORS = {}


def known(layer):
    return FACTORS.setdefault(layer.name, 2.0 + len(FACTORS))


class Known(kl.Layer):
    def call(self, x):
        return x * known(self)


def test_cells_that_code_outside_tells_apart_give_their_own_numbers():
    x = np.ones((2, 4), "float32")
    made = [Known(name=f"known_{i}") for i in range(4)]
    expected = keras.Sequential([keras.Input((4,)), *made])(x)
    for k in (1, 4):
        model = tfgpipe.GPipe([keras.Input((4,)), *made], k)
        np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
