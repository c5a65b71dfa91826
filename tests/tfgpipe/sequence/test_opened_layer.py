"""Layers whose inner calls take their place, and those that stay closed."""

import functools
import inspect
import types
import warnings

import keras
import numpy as np
import pytest
from functional import Block, Encoder, Noise, Residual, encoder
from keras import layers as kl
from keras import ops

import tfgpipe
from tfgpipe import internals
from tfgpipe.sequence.graph_calls import GraphCalls


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


class Fixed(Around):
    def __init__(self):
        super().__init__()
        self.norm = kl.BatchNormalization()

    def build(self, shape):
        super().build(shape)
        self.norm.build((*shape[:-1], 4))

    def call(self, x, training=None):
        return self.norm(self.second(self.first(x)), training=True)


class Leaks(Around):
    """What it tells a layer inside is what the next one inherits."""

    def __init__(self):
        super().__init__()
        self.norm = Fixed()
        self.dropout = kl.Dropout(0.5)

    def build(self, shape):
        super().build(shape)
        self.norm.build(shape)

    def call(self, x):
        return self.second(self.first(self.dropout(self.norm(x))))


class Counts(Around):
    def build(self, shape):
        super().build(shape)
        self.count = self.add_weight(
            (), "zeros", dtype="int32", trainable=False
        )

    def call(self, x, training=None):
        self.count.assign_add(1)
        return self.second(self.first(x))


class Reads(Counts):
    def call(self, x, training=None):
        return self.second(self.first(x)) * ops.square(self.first.kernel)[0, 0]


class Draws(Around):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=None):
        noise = keras.random.normal((4,), seed=self.seed_generator)
        return self.second(self.first(x)) + noise


class Constant(Around):
    def call(self, x, training=None):
        return self.second(self.first(x)) + np.random.rand(4)  # noqa: NPY002


class Drops(Around):
    def call(self, x, training=None):
        self.second(x)
        return self.first(x)


class Masks(Around):
    def compute_mask(self, inputs, previous_mask=None):
        return None


class Masking(Around):
    def call(self, x, training=None):
        return self.second(kl.Masking()(self.first(x)))


class NeedsRows(Around):
    def call(self, x, training=None):
        rows = ops.shape(x)[0]
        return self.second(self.first(x)) + ops.zeros((rows, 4))


class Reshapes(Around):
    def call(self, x, training=None):
        rows, length, width = ops.shape(x)
        y = ops.reshape(self.first(x), (rows, width, length))
        return self.second(ops.transpose(y, (0, 2, 1)))


class KnowsSizes(Around):
    def call(self, x, training=None):
        y = self.second(self.first(x))
        return y if ops.shape(x)[0] is None else 2.0 * y


class DrawsTwice(Around):
    """Draws for what is first in the code and last in the graph."""

    def __init__(self):
        super().__init__()
        self.dropout = kl.Dropout(0.5)

    def call(self, x, training=None):
        skip = self.dropout(x)
        return self.second(self.dropout(self.first(x))) + skip


class Shared(Around):
    """Two layers that draw from one generator."""

    def __init__(self):
        super().__init__()
        generator = keras.random.SeedGenerator(1)
        self.noises = [Noise(generator), Noise(generator)]

    def call(self, x, training=None):
        skip = self.noises[0](x)
        return self.second(self.noises[1](self.first(x))) + skip


class AddsLoss(Around):
    def call(self, x, training=None):
        y = self.second(self.first(x))
        self.add_loss(ops.mean(y))
        return y


class Keeps(Around):
    """Leaves something where another layer may find it."""

    kept = None

    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def call(self, x, training=None):
        y = self.first(x)
        self.keep(self, y, training)
        return self.second(y)


class Shelf:
    """What layers share."""

    items = []  # noqa: RUF012


class Slot:
    __slots__ = ("phase",)


class Odd:
    """Nothing that looks at it comes to an end."""

    def __getattr__(self, name):
        raise KeyError(name)


SHELF, SLOT, ODDS = Shelf(), Slot(), [Odd()]
SPACE = types.SimpleNamespace()
ARRAY = np.zeros(2)


def keep_in_object(layer, y, training):
    SHELF.training = training


def keep_in_list(layer, y, training):
    SHELF.items.append(1)


def keep_in_function(layer, y, training):
    (lambda: setattr(SHELF, "phase", training))()


def keep_in_slot(layer, y, training):
    SLOT.phase = training


def keep_in_namespace(layer, y, training):
    SPACE.phase = training


def keep_in_array(layer, y, training):
    ARRAY[0] += 1


def keep_in_attribute_of_function(layer, y, training):
    keep_in_attribute_of_function.phase = training


class KeepsByParent(Keeps):
    """Its code is another class's."""

    def __init__(self):
        super().__init__(keep_in_object)


class KeepsByStaticMethod(Around):
    @staticmethod
    def keep(training):
        SHELF.phase = training

    def call(self, x, training=None):
        self.keep(training)
        return self.second(self.first(x))


def keep_nothing(layer, y, training):
    assert len(ODDS) == 1
    layer.kept = (tuple(y.shape), y.dtype)


def keep_in_class(layer, y, training):
    Shelf.last = y


def keep_in_layer(layer, y, training):
    layer.kept = y


def keeping_in_closure():
    dictionary = {}

    def keep(layer, y, training):
        dictionary["count"] = dictionary.get("count", 0) + 1

    return keep


class HidesBranch(Around):
    """Weights that are zero hide, at first, what it does in inference."""

    def build(self, shape):
        super().build((*shape[:-1], 8))
        self.first.kernel.assign(np.eye(8, 4))

    def call(self, x, training=None):
        other = x if training else 2.0 * x
        return self.second(self.first(ops.concatenate([x, other], -1)))


class HidesBesideLarge(Around):
    """Another output is so large that this one is as good as zero."""

    def call(self, x, training=None):
        y = self.second(self.first(x))
        return (y if training else 0.5 * y), ops.zeros_like(x) - 1e30


class Switched(Around):
    """A whole number turns something on, in training."""

    def build(self, shape):
        super().build(shape)
        self.switch = Switch()
        self.switch.build(shape)

    def call(self, x, training=None):
        return self.second(self.switch(self.first(x), training=False))


class Switch(kl.Layer):
    def build(self, shape):
        self.on = self.add_weight((), "zeros", dtype="int32", trainable=False)

    def call(self, x, training=None):
        return ops.where(self.on > 0, 3.0 * x, x) if training else x


CLOSED = {
    "keeps its phase in an object": lambda: Keeps(keep_in_object),
    "keeps a number in a list": lambda: Keeps(keep_in_list),
    "keeps its phase by a function": lambda: Keeps(keep_in_function),
    "keeps its phase in a slot": lambda: Keeps(keep_in_slot),
    "keeps its phase in a namespace": lambda: Keeps(keep_in_namespace),
    "keeps a number in an array": lambda: Keeps(keep_in_array),
    "keeps its phase in a function": lambda: Keeps(
        keep_in_attribute_of_function
    ),
    "keeps by code of its parent": KeepsByParent,
    "keeps by a static method": KeepsByStaticMethod,
    "keeps a tensor in a class": lambda: Keeps(keep_in_class),
    "keeps a tensor in itself": lambda: Keeps(keep_in_layer),
    "keeps a number in a closure": lambda: Keeps(keeping_in_closure()),
    "hides a branch by zeros": HidesBranch,
    "hides a branch by large numbers": HidesBesideLarge,
    "fixes the phase of a switch": Switched,
    "one layer": lambda: kl.Dense(4),
    "of Keras": lambda: kl.TimeDistributed(kl.Dense(4)),
    "branches": Branches,
    "another training": Fixed,
    "leaks": Leaks,
    "assigns": Counts,
    "reads": Reads,
    "draws": Draws,
    "other constants": Constant,
    "calls that lead nowhere": Drops,
    "makes layers": Masking,
    "needs rows": NeedsRows,
    "reshapes to unknown sizes": Reshapes,
    "knows sizes": KnowsSizes,
    "draws twice": DrawsTwice,
    "shares a generator": Shared,
    "adds a loss": AddsLoss,
    "activity regularizer": functools.partial(
        Around, activity_regularizer="l2"
    ),
}


def inside(layer, shape=(3, 4)):
    """What is called where the layer was."""
    x = keras.Input(shape)
    calls = GraphCalls(keras.Model(x, layer(x))).found
    return [call.operation for call in calls]


class Divides(Around):
    """By a whole number; a word and many words are no tensors."""

    words = [str(i) for i in range(10**6)]  # noqa: RUF012

    def build(self, shape):
        super().build(shape)
        self.divisor = self.add_weight(
            (), keras.initializers.Constant(8), dtype="int32", trainable=False
        )
        self.divide = kl.Lambda(lambda x: x / ops.cast(self.divisor, x.dtype))

    def call(self, x, training=None):
        assert self.words
        return self.second(self.divide(self.first(x)))


def test_layer_that_keeps_its_shape_is_opened():
    layer = Keeps(keep_nothing)
    assert inside(layer) == [layer.first, layer.second]


def test_layer_that_divides_by_a_whole_number_is_opened():
    layer = Divides()
    assert inside(layer) == [layer.first, layer.divide, layer.second]


@pytest.mark.parametrize("kind", [Around, Masks])
def test_layer_that_only_calls_layers_is_opened(kind):
    layer = kind()
    assert inside(layer) == [layer.first, layer.second]


@pytest.mark.parametrize("name", CLOSED)
def test_layer_that_does_more_stays_closed(name):
    layer = CLOSED[name]()
    assert inside(layer) == [layer]


# Of layers in `CLOSED`.
WHY = {
    "draws": "its own code draws",
    "assigns": "its own code uses variable 'counts",
    "reads": "its own code uses variable 'reads",
    "calls that lead nowhere": "it calls layers of whose outputs nothing",
    "needs rows": "its code fails on symbolic tensors at test_opened_layer.py:",
    "shares a generator": "share state, or draw by one seed",
    "keeps a number in a list": "its code keeps something in Python",
    "knows sizes": "do not make at all sizes, in training and in inference,",
}


@pytest.mark.parametrize("name", WHY)
def test_error_says_why_a_layer_stays_closed(name):
    x = keras.Input((3, 4))
    layer = CLOSED[name]()
    model = keras.Model(x, layer(x))
    with pytest.raises(ValueError, match="number of layers, 1") as found:
        tfgpipe.GPipe(model, 2)
    start = f"Layer '{layer.name}' calls others, and stays whole: "
    assert start in str(found.value)
    assert WHY[name] in str(found.value)


def test_error_names_the_line_that_fails_on_symbolic_tensors():
    x = keras.Input((3, 4))
    _, line = inspect.getsourcelines(NeedsRows)
    with pytest.raises(ValueError, match=rf"opened_layer.py:{line + 3}, by"):
        tfgpipe.GPipe(keras.Model(x, NeedsRows()(x)), 2)


def test_error_says_that_a_layer_stays_whole_in_a_list():
    with pytest.raises(ValueError, match="stays whole in a list") as found:
        tfgpipe.GPipe([keras.Input((3, 4)), Around(name="own")], 2)
    cure = "Call it on a `keras.Input`, and pass `keras.Model(inputs, outputs)`"
    assert cure in str(found.value)
    x = keras.Input((3, 4))
    assert tfgpipe.GPipe(keras.Model(x, Around()(x)), 2)


def warned(layers, num_partitions=2, **kwargs):
    """What is said of cells when they are made."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = tfgpipe.GPipe(layers, num_partitions, **kwargs)
        model.predict(np.ones((2, 3, 4)), verbose=0)
        model.predict(np.ones((4, 3, 4)), verbose=0)
    texts = [str(one.message) for one in found]
    return [text for text in texts if text.startswith("Cells must have")]


def test_closed_layer_with_most_of_the_cost_is_warned_of_once():
    x = keras.Input((3, 4))
    draws = Draws()
    model = keras.Model(x, kl.ReLU()(draws(x)))
    (message,) = warned(model)
    assert f"layer '{draws.name}', which has 9" in message
    assert "% of the cost of all layers, and 2 cells." in message
    assert "calls others, and stays whole: its own code draws." in message


def test_layer_of_a_list_with_most_of_the_cost_is_warned_of():
    (message,) = warned([keras.Input((3, 4)), Around(name="own"), kl.ReLU()])
    assert "Layer 'own' calls others, and stays whole in a list." in message


def test_layer_with_most_of_the_cost_is_warned_of_with_a_cure():
    layers = [keras.Input((3, 4)), kl.Dense(4), kl.Dense(80, name="own")]
    (message,) = warned([*layers, kl.Dense(1)], 3)
    assert "layer 'own', which has" in message
    assert "and 3 cells. Ask for fewer cells" in message


def test_cells_that_are_cut_by_hand_are_not_warned_of():
    layers = [keras.Input((3, 4)), kl.Dense(4), kl.Dense(80)]
    assert not warned(layers, layers_per_cell=[1, 1])


@pytest.mark.parametrize("units", [4, 6])
def test_cells_of_nearly_equal_costs_are_not_warned_of(units):
    """Of two cells one has half of the cost, or a little more."""
    assert not warned([keras.Input((3, 4)), kl.Dense(4), kl.Dense(units)])


def test_one_cell_is_not_warned_of():
    assert not warned([keras.Input((3, 4)), kl.Dense(4), kl.Dense(80)], 1)


SIZES = {
    "even": lambda n: n % 2 == 0,
    "odd": lambda n: n % 2 == 1,
    "one": lambda n: n == 1,
    "more than one": lambda n: n > 1,
    "of four": lambda n: n % 4 == 0,
    "long": lambda n: n > 2000,
}


class Sized(Around):
    """Does something else where it knows that a size is of some kind."""

    def __init__(self, axis, is_so, phase=None):
        super().__init__()
        self.axis, self.is_so, self.phase = axis, is_so, phase

    def call(self, x, training=None):
        y, size = self.second(self.first(x)), ops.shape(x)[self.axis]
        is_other = isinstance(size, int) and self.is_so(size)
        if is_other and self.phase in (None, training):
            y = 2.0 * y
        return y


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", SIZES)
def test_layer_that_looks_at_sizes_stays_closed(name, axis):
    layer = Sized(axis, SIZES[name])
    assert inside(layer, (None, 4)) == [layer]


@pytest.mark.parametrize("phase", [True, False])
def test_layer_that_looks_at_sizes_in_one_phase_stays_closed(phase):
    layer = Sized(1, SIZES["even"], phase)
    assert inside(layer, (None, 4)) == [layer]


def test_layer_that_looks_at_sizes_that_it_cannot_have_is_opened():
    layer = Sized(1, SIZES["even"])
    assert inside(layer, (3, 4)) == [layer.first, layer.second]


class Pair(Around):
    """A layer that looks at sizes, and one that does not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Sized(1, SIZES["even"]), Around()

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)


def test_layer_around_one_that_looks_at_sizes_is_opened():
    layer = Pair()
    assert inside(layer, (None, 4)) == [layer.first, layer.second]


def test_nothing_is_left_of_looking_inside():
    layer, x = Counts(), keras.Input((3, 4))
    model = keras.Model(x, layer(x))
    before = len(internals.symbolic_calls(layer.first)), layer.count.numpy()
    name = keras.layers.Add().name
    GraphCalls(model)
    after = len(internals.symbolic_calls(layer.first)), layer.count.numpy()
    assert before == after
    number = int(name.rpartition("_")[2]) if "_" in name else 0
    assert keras.layers.Add().name == f"add_{number + 1}"


def test_blocks_inside_are_opened_and_spread_over_cells():
    model = tfgpipe.GPipe(encoder(3), 4, 2)
    calls = [call.operation for call in tfgpipe.layers_of(model.model)]
    assert not any(isinstance(c, (Encoder, Block)) for c in calls)
    costs = [cell.cost for cell in model.cells()]
    assert max(costs) < 1.35 * np.mean(costs)
    assert model.weights == model.model.weights
    on = {w.path: w.value.device for w in model.weights}
    assert len(set(on.values())) == 4


class Chooses(Around):
    """Whether it can be opened is no part of its config."""

    def __init__(self, is_the_same=True):
        super().__init__()
        self.is_the_same = is_the_same

    def call(self, x, training=None):
        y = self.first(x)
        return self.second(y) if self.is_the_same or training else y


def test_each_layer_is_asked_what_it_does():
    x = h = keras.Input((4,))
    for layer in map(Chooses, (True, False, True)):
        h = layer(h)
    found = tfgpipe.layers_of(keras.Model(x, h))
    names = [type(call.operation).__name__ for call in found]
    assert names == ["Dense", "Dense", "Chooses", "Dense", "Dense"]


@pytest.mark.parametrize("mask_zero", [False, True])
def test_layer_that_gets_a_mask_stays_closed(mask_zero):
    """Symbolic tensors do not show the mask, but a run of the model does."""
    x = keras.Input((5,), dtype="int32")
    embedder = keras.Model(x, kl.Embedding(9, 4, mask_zero=mask_zero)(x))
    tokens = keras.Input((5,), dtype="int32")
    layer = Residual()
    model = keras.Model(tokens, layer(embedder(tokens)))
    operations = [call.operation for call in GraphCalls(model).found]
    assert (layer in operations) == mask_zero


def test_small_layers_stay_closed():
    x = keras.Input((4,))
    model = keras.Model(x, kl.Dense(500)(Around()(x)))
    operations = [c.operation for c in tfgpipe.layers_of(model)]
    assert [type(o) for o in operations] == [Around, kl.Dense]


def test_mixed_precision_casts_as_in_keras():
    x = keras.Input((3, 4))
    layer = Around(dtype="mixed_bfloat16")
    for one in (layer.first, layer.second):
        one.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    model = keras.Model(x, layer(x))
    data = np.random.default_rng(0).standard_normal((4, 3, 4))
    found = tfgpipe.GPipe(model, 2, 2).predict(data, verbose=0)
    np.testing.assert_array_equal(found, model.predict(data, verbose=0))
    assert len(tfgpipe.layers_of(model)) == 3


class Scaled(Around):
    """Two attributes: one matters in training, one in inference."""

    in_training, in_inference = 1.0, 1.0

    def call(self, x, training=None):
        scale = self.in_training if training else self.in_inference
        return scale * self.second(self.first(x))


@pytest.mark.parametrize("name", ["in_training", "in_inference"])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_layer_that_is_changed_after_it_was_opened_is_refused(name, method):
    x = keras.Input((4,))
    layers = [Scaled() for _ in range(3)]
    h = x
    for layer in layers:
        h = layer(h)
    model = tfgpipe.GPipe(keras.Model(x, h), 2, 1)
    model.compile("sgd", "mse")
    data = np.zeros((4, 4), "float32")
    model.predict(data, verbose=0)
    setattr(layers[1], name, 2.0)
    with pytest.raises(ValueError, match=r"Received: \['scaled_1'\], of model"):
        getattr(model, method)(data, data, verbose=0)


class Stops(Around):
    """An attribute matters for gradients alone."""

    stops = False

    def call(self, x, training=None):
        y = ops.stop_gradient(x) if self.stops else x
        return self.second(self.first(y))


def test_gradients_that_are_stopped_after_it_was_opened_are_noticed():
    x = keras.Input((4,))
    layer = Stops()
    model = tfgpipe.GPipe(keras.Model(x, layer(kl.Dense(4)(x))), 2, 1)
    model.compile("sgd", "mse")
    layer.stops = True
    with pytest.raises(ValueError, match=r"Received: \['stops'\], of model"):
        model.fit(np.zeros((4, 4)), np.zeros((4, 4)), verbose=0)


def test_nested_sequential_that_grows_afterwards_is_refused():
    x = keras.Input((4,))
    inner = keras.Sequential([keras.Input((4,)), kl.Dense(4)], name="inner")
    model = tfgpipe.GPipe(keras.Model(x, inner(kl.Dense(4)(x))), 2, 1)
    inner.add(kl.Activation("relu"))
    with pytest.raises(ValueError, match=r"Received: \['inner'\], of model"):
        model.predict(np.zeros((4, 4)), verbose=0)


class ClosedAround(Around):
    """Stays closed, with a model inside."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((4,)), kl.Dense(4)])

    def call(self, x, training=None):
        y = self.inner(x)
        return self.second(self.first(y)) if training else y


def test_model_in_a_closed_layer_may_grow():
    x = keras.Input((4,))
    layer = ClosedAround()
    model = keras.Model(x, kl.Dense(4)(layer(x)))
    pipeline = tfgpipe.GPipe(model, 2, 1)
    layer.inner.add(kl.Activation("relu"))
    data = np.random.default_rng(0).standard_normal((4, 4))
    found = pipeline.predict(data, verbose=0)
    np.testing.assert_allclose(found, model.predict(data, verbose=0), 1e-6)


class AsksWhetherItIsTrained(Around):
    """What it computes does not depend on the answer."""

    def call(self, x, training=None):
        y = self.first(x)
        second = (self.second, self.second)[self.trainable]
        return second(y)


def test_opened_layer_that_asks_whether_it_is_trained_can_be_frozen():
    def trained(is_pipeline):
        keras.utils.set_random_seed(3)
        x = h = keras.Input((4,))
        inner = [AsksWhetherItIsTrained() for _ in range(3)]
        for layer in inner:
            h = layer(h)
        model = keras.Model(x, h)
        if is_pipeline:
            model = tfgpipe.GPipe(model, 2, 1)
            assert len(tfgpipe.layers_of(model.model)) == 6
        rows = np.random.default_rng(0).standard_normal((6, 4))
        for is_frozen in (False, True):
            inner[1].trainable = not is_frozen
            model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
            model.fit(rows, rows, 3, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for found, expected in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-6)


def test_size_that_was_not_tried_is_tried_when_it_comes():
    x = keras.Input((None, 4))
    layer = Sized(1, lambda n: n == 39)
    model = tfgpipe.GPipe(keras.Model(x, layer(x)), 2, 1)
    model.compile("sgd", "mse")
    assert len(tfgpipe.layers_of(model.model)) == 2
    data = np.ones((4, 39, 4), "float32")
    model.predict(data[:, :38], verbose=0)
    with pytest.raises(ValueError, match=r"of shapes \[\(None, 39, 4\)\]"):
        model.fit(data, data, verbose=0)
    assert len(inside(layer, (39, 4))) == 3


def test_number_of_rows_that_was_not_tried_is_tried_when_it_comes():
    x = keras.Input((4,))
    layer = Sized(0, lambda n: n == 39)
    model = tfgpipe.GPipe(keras.Model(x, layer(x)), 2, 1)
    model.compile("sgd", "mse")
    assert len(tfgpipe.layers_of(model.model)) == 2
    data = np.ones((39, 4), "float32")
    with pytest.raises(ValueError, match=r"of shapes \[\(39, 4\)\]"):
        model.train_on_batch(data, data)


class Passes(Around):
    """Returns what it got, beside what it made of it."""

    def call(self, x, training=None):
        return self.second(self.first(x)), x


class Joins(Around):
    def call(self, x, other, training=None):
        return self.second(self.first(x)) + other


def test_tensor_that_an_opened_layer_passes_on_is_one():
    x = keras.Input((4,))
    model = keras.Model(x, Joins()(*reversed(Passes()(x))))
    other = keras.Model(x, Joins()(Passes()(x)[1], x))
    data = np.random.default_rng(0).standard_normal((4, 4)).astype("float32")
    for one in (model, other):
        assert len(tfgpipe.layers_of(one)) > 2
        found = tfgpipe.GPipe(one, 2, 2).predict(data, verbose=0)
        np.testing.assert_allclose(found, one.predict(data, verbose=0), 1e-5)
