"""A model's graph with its backward pass, beside a tape around the model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from traces import Run, Watched, differentiated, tasks_of, traced

from tfgpipe.graphs import differentiate, parts_of

X = np.array([0.3, -0.7, 1.1], "float32")
W = np.array([0.5, 0.2, -0.4], "float32")
SPEC = tf.TensorSpec([3])


class Does(kl.Layer):
    """Calls a function of all that comes in."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.built = True

    def call(self, xs):
        return self.function(*xs)


FUNCTIONS = {
    "sin_then_product": [
        lambda x, w: (tf.sin(x), w),
        lambda y, w: y * w,
    ],
    "used_by_two_layers": [
        lambda x, w: (tf.tanh(x * w), w),
        lambda y, w: (tf.exp(y), y, w),
        lambda z, y, w: (z * y, y + w),
    ],
    "loop": [
        lambda x, w: (tf.scan(lambda a, t: a * t + w, tf.stack([x, w, x])),),
        lambda y: tf.identity(y),
    ],
    "through_integers": [
        lambda x, w: (x, tf.argsort(w), w),
        lambda x, order, w: x * tf.cast(order, x.dtype) + w,
    ],
    "source_itself": [lambda x, w: (x, x * w)],
    "added_where_it_is_made": [
        lambda x, w: (x * w, w),
        lambda y, w: (y, tf.sin(y), tf.cos(y), w),
        lambda y, a, b, w: y * a + b * w,
    ],
}


def by_tape(functions, x, w):
    """Outputs, their gradients and those of both inputs."""
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        values = x, w
        for function in functions:
            values = function(*values)
        outputs = keras.tree.flatten(values)
    dy = [tf.cos(y) for y in outputs]
    return outputs, dy, tape.gradient(outputs, [x, w], dy)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_a_tape_wherever_it_is_cut(name, cut):
    functions = FUNCTIONS[name]
    layers = [Does(function) for function in functions]
    places = [0, *(1 + i if cut else 1 for i in range(len(layers)))]
    given = [SPEC] * 2
    made = differentiated(traced([Watched(given), *layers], given, places))
    tasks = tasks_of(made)

    def step(x, w):
        one = Run(made, tasks, [x, w])
        one.forward()
        outputs = one.of(made.traced.outputs)
        one.begin_backward([tf.cos(y) for y in outputs], [])
        one.backward()
        return outputs, one.dx()

    x, w = tf.constant(X), tf.constant(W)
    found = tf.function(step, autograph=False)(x, w)
    outputs, _, gradients = by_tape(functions, x, w)
    for a, b in zip(
        keras.tree.flatten(found), [*outputs, *gradients], strict=True
    ):
        np.testing.assert_allclose(a, b, 1e-6)


def kinds_of(part):
    return {part.whole.nodes[name].op for name in part.backward}


def test_gradient_of_an_operation_is_where_that_is():
    layers = [kl.Lambda(tf.sin), kl.Lambda(tf.tanh), kl.Lambda(tf.sigmoid)]
    made = differentiated(traced([Watched(SPEC), *layers], SPEC))
    parts = parts_of(made, 4, [[]])
    found = [kinds_of(part) for part in parts]
    own = ["Neg", "Cos", "TanhGrad", "SigmoidGrad"]
    for k, kind in enumerate(own):
        assert [i for i, kinds in enumerate(found) if kind in kinds] == [k]
    for part in parts:
        places = {made.places[name] for name in part.forward | part.backward}
        cells = {made.traced.cell_of(place) for place in places}
        assert cells <= {part.index}


def test_sum_of_gradients_is_where_the_first_of_them_is():
    """One gradient goes back to the cell that has made the tensor."""
    layers = [
        Watched([SPEC]),
        Does(lambda x: (tf.sin(x),)),
        Does(lambda y: (y, tf.tanh(y))),
        Does(lambda y, z: y * z),
    ]
    made = differentiated(traced(layers, [SPEC]))
    parts = parts_of(made, 4, [[]])
    assert [len(part.takes_back) for part in parts] == [1, 1, 2, 1]
    assert kinds_of(parts[2]) & {"AddN", "AddV2"}
    assert not kinds_of(parts[1]) & {"AddN", "AddV2"}


class Has(kl.Layer):
    """Has a weight, and calls a function of it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = self.add_weight((3,), "ones")

    def call(self, x):
        return self.function(x, self.w)


def test_weight_without_influence_has_no_gradient():
    used, unused = Has(lambda x, w: x * w), Has(lambda x, w: x)
    layers = [used, unused, Has(lambda x, w: x + 0 * tf.size(w, tf.float32))]
    made = differentiated(traced(layers, SPEC))
    found = {
        id(use.variable): d.dense is not None or bool(d.slices)
        for use, d in zip(made.traced.uses, made.dw)
    }
    assert found[id(used.w)]
    assert [*found.values()].count(True) == 1


def test_what_has_no_gradient_from_outside_has_none():
    model = traced([Does(lambda x, w: (2 * x, 3 * w))], [SPEC] * 2)
    assert differentiate(model, [False, False], []).backward == set()
    given = [SPEC] * 2
    model = traced([Watched(given), Does(lambda x, w: (2 * x, 3 * w))], given)
    made = differentiate(model, [True, False], [])
    assert [d is not None for d in made.dy] == [True, False]
    assert [d.dense is not None for d in made.dw] == [True, False]


def test_gradients_of_lookups_stay_sparse_and_apart():
    table = Has(lambda x, w: x * tf.gather(w, [1]) * tf.gather(w, [2]))
    (d,) = differentiated(traced([table], SPEC)).dw
    assert d.dense is None
    assert len(d.slices) == 2


def test_what_varies_follows_from_the_rows_or_from_what_is_assigned():
    class Keeps(kl.Layer):
        def __init__(self):
            super().__init__()
            self.moved = self.add_weight((), "ones", trainable=False)
            self.fixed = self.add_weight((), "ones", trainable=False)

        def call(self, x):
            size = tf.cast(tf.shape(x)[0], x.dtype)
            found.update(
                rows=2.0 * x,
                size=2.0 * size,
                fixed=2.0 * self.fixed,
                moved=2.0 * self.moved,
                constant=tf.range(3),
            )
            self.moved.assign_add(1.0)
            return x

    found = {}
    varies = traced([Keeps()], tf.TensorSpec([None])).varying()
    assert {name for name, t in found.items() if varies(t)} == {"rows", "moved"}


def test_sizes_vary_by_values_that_vary_alone():
    def sizes(x, _):
        turned = tf.transpose(x, [1, 0])  # by constants
        count = tf.cast(tf.reduce_sum(x), "int32")
        found.update(
            turned=tf.range(tf.shape(turned)[0]),
            cut=tf.range(tf.shape(x[:, :count])[1]),
        )
        return x

    found = {}
    spec = tf.TensorSpec([None, None])
    varies = traced([Does(sizes)], [spec, spec]).varying()
    assert {name for name, t in found.items() if varies(t)} == {"cut"}
