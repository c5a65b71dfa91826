"""Steps: calls of a list or a model, and what is inside of large ones."""

import importlib
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
from functional import encoder, nested, siamese
from keras import layers as kl
from keras import ops

import tfgpipe


def names(model):
    return [type(c.operation).__name__ for c in tfgpipe.layers_of(model)]


def test_calls_of_a_nested_model_take_its_place():
    assert names(siamese()).count("Dense") == 5
    assert "Sequential" not in names(siamese())
    assert "Functional" not in names(nested())


SHARDS = importlib.import_module("tfgpipe.model.groups")


class Around(kl.Layer):
    """Two layers, and whatever a test adds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = kl.Dense(4), kl.Dense(4)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 4))
        self.built = True

    def call(self, x, training=None):
        return self.second(self.first(x))


class Branches(Around):
    def call(self, x, training=None):
        return self.second(self.first(x)) if training else self.first(x)


class Reshapes(Around):
    def call(self, x, training=None):
        rows, length, width = ops.shape(x)
        y = ops.reshape(self.first(x), (rows, width, length))
        return self.second(ops.transpose(y, (0, 2, 1)))


class DrawsTwice(Around):
    """Draws for what is first in the code and last in the graph."""

    def __init__(self):
        super().__init__()
        self.dropout = kl.Dropout(0.5)

    def call(self, x, training=None):
        skip = self.dropout(x)
        return self.second(self.dropout(self.first(x))) + skip


class Keeps(Around):
    """Leaves something where another layer may find it."""

    kept = None

    def call(self, x, training=None):
        Keeps.kept = self.first(x)
        return self.second(Keeps.kept)


class Flagged(Around):
    """Tells the layer inside what to do, by an attribute."""

    def __init__(self):
        super().__init__()
        self.inner = Switch()

    def call(self, x, training=None):
        self.inner.is_on = True
        return self.second(self.inner(self.first(x)))


class Switch(kl.Layer):
    is_on = False

    def call(self, x):
        return 3.0 * x if self.is_on else x


KINDS = {
    kind.__name__: kind
    for kind in (
        Around,
        Branches,
        Reshapes,
        DrawsTwice,
        Keeps,
        Flagged,
    )
}
KINDS["of Keras"] = lambda: kl.TimeDistributed(kl.Dense(4))


@pytest.mark.parametrize("name", KINDS)
def test_layers_that_are_cut_inside_train_as_in_keras(name):
    is_list = len(name) % 2 == 0  # a half of them

    def trained(k):
        keras.utils.set_random_seed(3)
        layers = [kl.Dense(4), KINDS[name](), KINDS[name]()]
        model = keras.Sequential([keras.Input((3, 4)), *layers])
        if not is_list:
            x = keras.Input((3, 4))
            model = keras.Model(x, layers[2](layers[1](layers[0](x))))
        if k:
            model = tfgpipe.GPipe(model, k, 1)
            sizes = [len(cell.layers) for cell in model.cells()]
            assert name == "of Keras" or sum(sizes) > 3
        how = {"jit_compile": False}
        model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", **how)
        rows = np.random.default_rng(0).standard_normal((6, 3, 4))
        model.fit(rows, rows, 3, shuffle=False, verbose=0)
        return [*model.get_weights(), model.predict(rows, verbose=0)]

    for found, expected in zip(trained(3), trained(0), strict=True):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-6)


def test_blocks_inside_are_spread_over_cells():
    model = tfgpipe.GPipe(encoder(3), 4, 2)
    costs = [cell.cost for cell in model.cells()]
    assert max(costs) < 1.35 * np.mean(costs)
    assert model.weights == model.model.weights
    on = {w.path: w.value.device for w in model.weights}
    assert len(set(on.values())) == 4


def test_small_layers_of_many_are_one_step():
    dense = [kl.Dense(50) for _ in range(40)]
    layers = [keras.Input((4,)), Around(name="own"), *dense]
    (cell,) = tfgpipe.GPipe(layers, 1).cells()
    assert cell.layers[0] == "own" and len(cell.layers) == 41


def test_costs_of_a_call_are_spread_over_its_steps():
    layers = [keras.Input((4,)), (Around(), 6.0), (kl.Dense(4), 2.0)]
    cells = tfgpipe.GPipe(layers, 3, layers_per_cell=[1, 1, 1]).cells()
    assert [cell.cost for cell in cells] == [3, 3, 2]


def test_cost_function_gets_inputs_that_are_keywords():
    seen = []
    x = keras.Input((4,))
    (call,) = tfgpipe.layers_of(keras.Model(x, kl.Dense(3)(inputs=x)))
    tfgpipe.GPipe([(call, lambda _, spec: seen.append(spec) or 1.0)], 1)
    assert seen[0].shape == (None, 4)


def test_layers_per_cell_counts_layers_or_steps():
    def cut(*counts):
        layers = [keras.Input((4,)), Around(), kl.Dense(4)]
        model = tfgpipe.GPipe(layers, 2, layers_per_cell=counts)
        return [len(cell.layers) for cell in model.cells()]

    assert cut(1, 1) == [2, 1]
    assert cut(1, 2) == [1, 2]
    with pytest.raises(ValueError, match=r"a sum of 3: .*\(sum 4\)"):
        cut(2, 2)


def test_more_cells_than_steps_are_refused():
    layers = [keras.Input((4,)), Around(), kl.Dense(4)]
    with pytest.raises(ValueError, match=r"number of layers, 3\. Received"):
        tfgpipe.GPipe(layers, 4)


@pytest.mark.parametrize("is_nested", [False, True])
def test_operation_reads_variables_in_the_precision_of_its_model(is_nested):
    x = keras.Input((3,), dtype="float32")
    dense = kl.Dense(3, dtype="float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Model(x, dense(x) * dense.bias)
    keras.config.set_dtype_policy("float32")
    if is_nested:
        outer = keras.Input((3,), dtype="float32")
        model = keras.Model(outer, model(outer))
    dense.bias.assign([1.001, 2.003, 3.007])  # none a bfloat16
    data = np.random.default_rng(0).standard_normal((4, 3), "float32")
    expected = model.predict(data, verbose=0)
    found = tfgpipe.GPipe(model, 1).predict(data, verbose=0)
    np.testing.assert_array_equal(found, expected)
    precise = (data @ dense.kernel + dense.bias) * dense.bias
    assert np.abs(expected - precise).max() > 1e-4


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
@pytest.mark.parametrize("are_named", [False, True])
def test_nested_model_takes_of_a_dict_what_it_takes_in_keras(are_named):
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    inputs = {"a": a, "b": b} if are_named else [a, b]
    inner = keras.Model(inputs, kl.Dense(2)(kl.Concatenate()([a, 2.0 * b])))
    x = keras.Input((3,))
    made = {"aa": kl.Dense(3)(x), "b": kl.Dense(3)(x), "a": x}
    model = keras.Model(x, inner(made))
    data = np.random.default_rng(0).standard_normal((4, 3))
    found = tfgpipe.GPipe(model, 2).predict(data, verbose=0)
    np.testing.assert_allclose(found, model.predict(data, verbose=0), 1e-6)


def warned(layers, num_partitions=2, **kwargs):
    """Returns what is said of cells, as if a step took time."""
    with (
        mock.patch.object(SHARDS, "_FEW_FLOPS", 0.0),
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        model = tfgpipe.GPipe(layers, num_partitions, **kwargs)
        model.predict(np.ones((2, 3, 4)), verbose=0)
        model.predict(np.ones((4, 3, 4)), verbose=0)
    texts = [str(one.message) for one in found]
    return [text for text in texts if "devices wait for layer" in text]


def test_layer_with_most_of_the_cost_is_warned_of_with_a_cure():
    layers = [keras.Input((3, 4)), kl.Dense(4), kl.Dense(80, name="own")]
    (message,) = warned([*layers, kl.Dense(1)], 3)
    assert "With num_partitions=3, devices wait for layer 'own'" in message
    assert "pass num_partitions=1, or `shards`" in message


@pytest.mark.parametrize(
    ("second", "arguments", "is_warned"),
    [
        (lambda: kl.Dense(4), {}, False),
        (lambda: kl.Dense(6), {}, False),  # a little more than half
        (lambda: kl.Dense(8), {}, False),  # two thirds, in one of two cells
        (lambda: kl.Dense(16), {}, True),
        (lambda: kl.Dense(80), {"layers_per_cell": [1, 1]}, False),
        (lambda: kl.Dense(80), {"num_partitions": 1}, False),
        (lambda: Around(name="own"), {}, False),  # is cut inside
    ],
)
def test_layer_with_most_of_the_cost_is_warned_of_where_cells_wait(
    second, arguments, is_warned
):
    layers = [keras.Input((3, 4)), kl.Dense(4), second()]
    assert bool(warned(layers, **arguments)) == is_warned


class HasModel(Around):
    """Has a model inside."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((4,)), kl.Dense(4)])

    def call(self, x, training=None):
        y = self.inner(x)
        return self.second(self.first(y)) if training else y


def test_model_in_a_layer_may_grow():
    x = keras.Input((4,))
    layer = HasModel()
    model = keras.Model(x, kl.Dense(4)(layer(x)))
    pipeline = tfgpipe.GPipe(model, 2, 1)
    layer.inner.add(kl.Activation("relu"))
    data = np.random.default_rng(0).standard_normal((4, 4))
    found = pipeline.predict(data, verbose=0)
    np.testing.assert_allclose(found, model.predict(data, verbose=0), 1e-6)


class Passes(Around):
    """Returns what it got, beside what it made of it."""

    def call(self, x, training=None):
        return self.second(self.first(x)), x


class Joins(Around):
    def call(self, x, other, training=None):
        return self.second(self.first(x)) + other


def test_tensor_that_a_layer_passes_on_is_one():
    x = keras.Input((4,))
    model = keras.Model(x, Joins()(*reversed(Passes()(x))))
    other = keras.Model(x, Joins()(Passes()(x)[1], x))
    data = np.random.default_rng(0).standard_normal((4, 4)).astype("float32")
    for one in (model, other):
        found = tfgpipe.GPipe(one, 2, 2).predict(data, verbose=0)
        np.testing.assert_allclose(found, one.predict(data, verbose=0), 1e-5)
