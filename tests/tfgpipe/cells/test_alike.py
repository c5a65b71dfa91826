"""Which layers are called alike: two that differ never may be."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from kinds import Block

import tfgpipe
from tfgpipe.cells import alike
from tfgpipe.cells.alike import likeness


def like(layers):
    return likeness(layers, [v for la in layers for v in la.variables])


def of(layer, shape=(None, 6, 4)):
    if not layer.built:
        layer.build(shape)
    return likeness([layer], layer.variables)


def test_code_is_read_once_for_all_calls_that_share_what_was_read(monkeypatch):
    read = []

    class Noted(alike.Reading):
        def __init__(self, *roots):
            read.append(roots)
            super().__init__(*roots)

    monkeypatch.setattr(alike, "Reading", Noted)
    layers, readings = [Scale(2.0), Scale(2.0), Scale(3.0)], {}
    found = [likeness([layer], [], readings) for layer in layers]
    assert found[0] == found[1] != found[2]
    assert (Scale,) in read and len(read) == len(set(read))


# -------------------------------------------------------------------- alike
class Scale(kl.Layer):
    """Multiplies by its attribute."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        self.built = True

    def call(self, x):
        return x * self.factor


def positive(x):
    return keras.ops.maximum(x, 0.0)


def attention():
    layer = kl.MultiHeadAttention(2, 2, dropout=0.1)
    layer.build((None, 6, 4), (None, 6, 4))
    return layer


ALIKE = {
    "dense": lambda: kl.Dense(4, "gelu", kernel_regularizer="l2"),
    "convolution": lambda: kl.Conv1D(4, 3, padding="same"),
    "normalization": lambda: kl.BatchNormalization(),
    "dropout": lambda: kl.Dropout(0.3),
    "recurrent": lambda: kl.Bidirectional(kl.LSTM(4)),
    "attention": attention,
    "einsum": lambda: kl.EinsumDense("abc,cd->abd", (None, 4)),
    "function": lambda: kl.Lambda(positive),
    "constant": lambda: Scale(np.arange(4.0)),
    "partial": lambda: Scale(functools.partial(positive)),
    "constraint": lambda: kl.Dense(
        4, kernel_constraint=keras.constraints.MaxNorm(2.0)
    ),
    "mixed": lambda: kl.Dense(4, dtype="mixed_bfloat16"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_layers_are_alike(name):
    assert of(ALIKE[name]()) == of(ALIKE[name]())
    assert hash(of(ALIKE[name]())) == hash(of(ALIKE[name]()))


def test_names_and_initializers_do_not_matter():
    one = kl.Dense(4, name="one", kernel_initializer="zeros")
    other = kl.Dense(4, name="other", kernel_initializer="zeros")
    other.build((None, 6, 4))
    other.kernel.assign(np.ones((4, 4)))
    assert of(one) == of(other)


def test_lists_of_layers_are_alike_layer_by_layer():
    def layers():
        made = [kl.Dense(4), kl.Activation("relu"), kl.Dropout(0.1)]
        for layer in made:
            layer.build((None, 4))
        return made

    assert like(layers()) == like(layers())
    assert like(layers()) != like(layers()[:2])
    assert like(layers()) != like(layers()[::-1])


# ------------------------------------------------------------------- unlike
def frozen(layer):
    layer.trainable = False
    return layer


def sublayers(shared):
    a = kl.Dense(4)
    return Scale([a, a if shared else kl.Dense(4)])


class Twice(kl.Layer):
    """Two weights, or one weight twice."""

    def __init__(self, shared):
        super().__init__()
        self.a = self.add_weight(shape=(4,))
        self.b = self.a if shared else self.add_weight(shape=(4,))

    def call(self, x):
        return x * self.a + self.b


class Freeze(kl.Layer):
    def __init__(self, trainable):
        super().__init__()
        self.a = self.add_weight(shape=(4,), trainable=trainable)

    def call(self, x):
        return x * self.a


class Penalty(keras.regularizers.Regularizer):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * keras.ops.mean(keras.ops.square(x))


class Factor:
    """Not of Keras."""

    def __init__(self, factor):
        self.factor = factor

    def of(self, x):
        return x * self.factor


def scaled(factor):
    return lambda x: x * factor


# Each of two arguments that give layers which compute something else.
UNLIKE = {
    "class": ((kl.ReLU, kl.ELU), lambda cls: cls()),
    "units": ((3, 4), lambda v: kl.Dense(v)),
    "activation": (("relu", "gelu"), lambda v: kl.Dense(4, v)),
    "bias": ((False, True), lambda v: kl.Dense(4, use_bias=v)),
    "epsilon": ((1e-3, 1e-5), lambda v: kl.LayerNormalization(epsilon=v)),
    "momentum": ((0.9, 0.99), lambda v: kl.BatchNormalization(momentum=v)),
    "rate": ((0.1, 0.2), lambda v: kl.Dropout(v)),
    "input": (((None, 3), (None, 5)), lambda v: built(kl.Dense(4), v)),
    "policy": (
        ("float32", "mixed_bfloat16"),
        lambda v: kl.Dense(4, dtype=v),
    ),
    "dtype": (("float32", "float16"), lambda v: kl.Dense(4, dtype=v)),
    "trainable": ((False, True), lambda v: kl.Dense(4, trainable=v)),
    "trainable_weight": ((False, True), Freeze),
    "trainable_inside": (
        (False, True),
        lambda v: Scale([kl.Dense(4, trainable=v)]),
    ),
    "shared_layer": ((False, True), sublayers),
    "shared_weight": ((False, True), Twice),
    "number": ((2.0, 3.0), Scale),
    "kind_of_number": ((1, True), Scale),
    "whole_and_real_number": ((1, 1.0), Scale),
    "text": (("a", "b"), Scale),
    "nest": (([1, {"a": (2, 3)}], [1, {"a": (2, 4)}]), Scale),
    "list_and_tuple": (((1, 2), [1, 2]), Scale),
    "keys": (({"a": 1}, {"b": 1}), Scale),
    "array": ((np.arange(4.0), np.arange(4.0) + 1), Scale),
    "dtype_of_array": ((np.zeros(2, "float32"), np.zeros(2, "int32")), Scale),
    "shape_of_array": ((np.zeros((2, 3)), np.zeros((3, 2))), Scale),
    "tensor": ((2.0, 3.0), lambda v: Scale(tf.constant(v))),
    "variable_of_tensorflow": ((2.0, 3.0), lambda v: Scale(tf.Variable(v))),
    "function": ((keras.ops.relu, keras.ops.gelu), kl.Lambda),
    "closure": ((2.0, 3.0), lambda v: kl.Lambda(scaled(v))),
    "arguments": ((2.0, 3.0), lambda v: kl.Lambda(np.add, arguments={"x": v})),
    "partial": (
        (2.0, 3.0),
        lambda v: Scale(functools.partial(np.multiply, v)),
    ),
    "method": ((2.0, 3.0), lambda v: Scale(Factor(v).of)),
    "object": ((2.0, 3.0), lambda v: Scale(Factor(v))),
    "class_attribute": ((2.0, 3.0), lambda v: Scale(type("C", (), {"v": v}))),
    "constraint": (
        (1.0, 2.0),
        lambda v: kl.Dense(4, kernel_constraint=keras.constraints.MaxNorm(v)),
    ),
    "regularizer": (
        (0.1, 0.2),
        lambda v: kl.Dense(4, activity_regularizer=Penalty(v)),
    ),
    "seed": ((1, 2), lambda v: kl.Dropout(0.5, seed=v)),
    "metric": (("a", "b"), lambda v: Scale(keras.metrics.Mean(v))),
    "inside": ((1e-3, 1e-5), lambda v: Scale(kl.LayerNormalization(epsilon=v))),
    "deep_inside": (
        (1e-3, 1e-5),
        lambda v: Scale({"a": [Scale((kl.LayerNormalization(epsilon=v),))]}),
    ),
    "initializer_of_the_user": (
        (2.0, 3.0),
        lambda v: Scale(type("Own", (keras.initializers.Zeros,), {"v": v})()),
    ),
    "late": ((2.0, 3.0), lambda v: with_attribute(kl.Dense(4), "late", v)),
    "call": (
        (2.0, 3.0),
        lambda v: with_attribute(kl.ReLU(), "call", scaled(v)),
    ),
}


def built(layer, shape):
    layer.build(shape)
    return layer


def with_attribute(layer, name, value):
    setattr(layer, name, value)
    return layer


@pytest.mark.parametrize("name", UNLIKE)
def test_layers_that_differ_are_not_alike(name):
    (one, other), make = UNLIKE[name]
    assert of(make(one)) != of(make(other))


def test_frozen_later_is_not_alike():
    assert of(kl.Dense(4)) != of(frozen(kl.Dense(4)))


def test_what_two_layers_share_counts():
    """Gradients of one shared layer are those of both uses."""

    def layers(shared):
        one = kl.Dense(4)
        made = [one, one if shared else kl.Dense(4)]
        for layer in made:
            if not layer.built:
                layer.build((None, 4))
        return made

    assert like(layers(True)) == like(layers(True))
    assert like(layers(True)) != like(layers(False))


def test_layer_that_refers_to_itself_ends():
    def make():
        layer = Scale(2.0)
        layer.others = [layer]
        return layer

    assert likeness([make()], []) == likeness([make()], [])


def test_likeness_of_a_block_is_that_of_what_it_holds():
    one, other = Block(4), Block(4)
    other.norm.epsilon *= 2
    for block in (one, other):
        block.build((None, 6, 4))
    assert like([one]) != like([other])


# ------------------------------------------------------------- what comes out
def test_cells_that_look_alike_but_differ_give_their_own_numbers():
    """Every layer above that maps a tensor to one of its shape, in turn."""
    keras.utils.set_random_seed(1)
    same = [
        kl.LayerNormalization(epsilon=1e-3),
        kl.LayerNormalization(epsilon=1.0),
        Scale(2.0),
        Scale(3.0),
        kl.Lambda(scaled(0.5)),
        kl.Lambda(scaled(0.7)),
        Scale(np.arange(4, dtype="float32")),
        Scale(np.arange(4, dtype="float32")[::-1].copy()),
    ]
    x = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")
    model = tfgpipe.GPipe([keras.Input((4,)), *same], 8, 2)
    expected = x
    for layer in same:
        expected = layer(expected)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), expected, 1e-6, 1e-6
    )


class Holder(keras.regularizers.Regularizer):
    def __call__(self, x):
        return 0.0


class Hiding(kl.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.set(factor)


class Underscore(Hiding):
    """Keras Hub's own TransformerDecoder has names like `_self_attention...`"""

    def set(self, factor):
        self._self_attention_scale = factor

    def call(self, x):
        return x * self._self_attention_scale


class Initializer(Hiding):
    def set(self, factor):
        self.start = keras.initializers.Constant(factor)

    def call(self, x):
        return x * self.start(x.shape[-1:], x.dtype)


class Untracked(Hiding):
    """A variable that is no argument of the cell."""

    def set(self, factor):
        self.holder = Holder()
        self.holder.v = keras.Variable(factor, trainable=False)

    def call(self, x):
        return x * self.holder.v


class RegularizerName(Hiding):
    def set(self, factor):
        self.holder = Holder()
        self.holder.name = str(factor)

    def call(self, x):
        return x * float(self.holder.name)


class Named(Hiding):
    def __init__(self, factor):
        super().__init__(factor, name="by_" + str(factor).replace(".", "_"))

    def set(self, factor):
        pass

    def call(self, x):
        return x * float(self.name[3:].replace("_", "."))


class InitialSeed(Hiding):
    def set(self, factor):
        self._initial_seed = int(factor)

    def call(self, x):
        return x + keras.random.normal((4,), seed=self._initial_seed)


class Slots(Hiding):
    __slots__ = ("factor",)

    def set(self, factor):
        self.factor = factor

    def call(self, x):
        return x * self.factor


class Real(float):
    pass


class Subclass(Hiding):
    def set(self, factor):
        self.factor = Real(1.0)
        self.factor.really = factor

    def call(self, x):
        return x * self.factor.really


class OfPartial(Hiding):
    def set(self, factor):
        self.f = functools.partial(abs)
        self.f.factor = factor

    def call(self, x):
        return x * self.f.factor


class SupportsJit(Hiding):
    def set(self, factor):
        self.supports_jit = factor == 2.0

    def call(self, x):
        return x * (2.0 if self.supports_jit else 3.0)


@pytest.mark.parametrize("cls", Hiding.__subclasses__())
def test_layers_that_hide_what_differs_are_not_alike(cls):
    one, other = cls(2.0), cls(3.0)
    one.build((None, 4))
    other.build((None, 4))
    assert like([one]) != like([other])


@pytest.mark.parametrize("cls", Hiding.__subclasses__())
def test_cells_of_such_layers_give_their_own_numbers(cls):
    x = np.ones((2, 4), "float32")
    outputs = [
        tfgpipe.GPipe([keras.Input((4,)), cls(2.0), cls(3.0)], k).predict(
            x, verbose=0
        )
        for k in (1, 2)
    ]
    np.testing.assert_array_equal(*outputs)
