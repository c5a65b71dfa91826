"""Updates are Keras's, and traced once for weights of equal shape."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import step_graph
from quick import quick

import tfgpipe
from tfgpipe import internals
from tfgpipe.devices import names as names_lib
from tfgpipe.devices import placement
from tfgpipe.run import update

SHAPES = ((3, 4), (4,), (3, 4), (), (4,), (2, 2, 2))


def variables(k=3):
    rng = np.random.default_rng(0)
    made = []
    for i, shape in enumerate(SHAPES):
        with tf.device(f"CPU:{i % k}"):
            value = rng.standard_normal(shape)
            made.append(keras.Variable(value, dtype="float32"))
    return made


def gradients(step=0):
    rng = np.random.default_rng(step + 1)
    return [tf.constant(rng.standard_normal(s), "float32") for s in SHAPES]


def trained(optimizer, compiles=False, k=3, steps=1):
    """Values and slots after some steps, each of them in a graph."""
    weights = variables(k)
    optimizer.build(weights)
    for variable in weights:  # as `build_optimizer` does
        slots = [
            slot
            for one in internals.with_inner(optimizer)
            if type(one) is keras.optimizers.Adafactor
            for slot in internals.slots(one, variable)
        ]
        placement.create_or_move(slots, variable.value.device)

    @tf.function(autograph=False)
    def step(found):
        pairs = list(zip(found, weights))
        update.update_on_devices(optimizer, pairs, compiles)

    for i in range(steps):
        step(gradients(i))
    return [v.numpy() for v in [*weights, *optimizer.variables]]


class Slow(keras.optimizers.SGD):
    """A user's optimizer, whose update depends on what Keras's do not."""

    def update_step(self, gradient, variable, learning_rate):
        factor = 0.5 if variable is self.first else 1.0
        super().update_step(gradient * factor, variable, learning_rate)

    def build(self, weights):
        super().build(weights)
        self.first = weights[0].value


class Halving(keras.optimizers.SGD):
    """A user's optimizer that has its own way to change a variable."""

    def assign_sub(self, variable, value):
        variable.assign_sub(tf.cast(value / 2, variable.dtype))


def with_own_assign():
    """An attribute in place of a method."""
    optimizer = keras.optimizers.Adam()
    optimizer.assign_add = lambda v, value: v.assign_add(value * 0.9)
    return optimizer


class Same(keras.optimizers.Adam):
    """A subclass that keeps the update of its parent."""

    def __init__(self, **kwargs):
        super().__init__(0.1, **kwargs)


OPTIMIZERS = {
    **{
        name: getattr(keras.optimizers, name)
        for name in "Adafactor Adam AdamW Ftrl Lamb Muon Nadam SGD".split()
    },
    "momentum": lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True),
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.Nadam(
        0.1, gradient_accumulation_steps=2
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "average": lambda: keras.optimizers.SGD(0.1, 0.9, use_ema=True),
    "own": lambda: Slow(0.1, momentum=0.5),
    "own_assign": lambda: Halving(0.1),
    "own_attribute": with_own_assign,
    "subclass": Same,
}


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [
        *dict.fromkeys("Adam AdamW SGD Ftrl subclass".split(), True).items(),
        *dict.fromkeys("average accumulation".split(), True).items(),
        *dict.fromkeys("own own_assign own_attribute".split(), False).items(),
        *dict.fromkeys("Muon Lamb".split(), False).items(),
    ],
)
def test_equal_weights_share_one_trace_of_what_keras_wrote(
    name, is_shared, monkeypatch
):
    optimizer = OPTIMIZERS[name]()
    counts = []
    cls = next(c for c in type(optimizer).__mro__ if "update_step" in vars(c))
    plain = cls.update_step

    def counted(self, *args):
        counts.append(args)
        return plain(self, *args)

    monkeypatch.setattr(cls, "update_step", counted)
    if plain in update._ALIKE:
        monkeypatch.setattr(update, "_ALIKE", {*update._ALIKE, counted})
    trained(optimizer)
    # One whatever their devices; or one for each.
    assert len(counts) == len({*SHAPES} if is_shared else SHAPES)


def test_instance_gets_its_methods_back():
    def fail(variable, value):
        raise RuntimeError("out of luck")

    optimizer = keras.optimizers.Adam()
    weights = variables()
    optimizer.build(weights)
    optimizer.assign_sub = fail
    before = {**vars(optimizer)}
    pairs = list(zip(gradients(), weights))
    step = tf.function(
        lambda: update.update_on_devices(optimizer, pairs), autograph=False
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        step()
    assert vars(optimizer) == before


# --------------------------------------------------------------------- places
def calls_of(optimizer, compiles=False, k=3):
    """The calls of functions in an update, and all other operations."""
    weights = variables(k)
    optimizer.build(weights)

    def step(*found):
        pairs = list(zip(found, weights))
        update.update_on_devices(optimizer, pairs, compiles)

    traced = tf.function(step, autograph=False)
    graph = traced.get_concrete_function(*gradients()).graph
    own = [op for op in graph.get_operations() if op.type != "Placeholder"]
    calls = [op for op in own if "PartitionedCall" in op.type]
    return calls, [op for op in own if op not in calls], graph


def test_update_is_one_function_a_device():
    calls, others, graph = calls_of(keras.optimizers.Adam(global_clipnorm=1.0))
    #     squares on three devices; what is common; updates on three devices
    devices = [op.device[-5:] for op in calls]
    assert devices == ["CPU:0", "CPU:1", "CPU:2", "CPU:0"] + devices[:3]
    assert {op.type for op in others} <= {"NoOp", "Identity"}
    captured = {id(inner): outer for outer, inner in graph.captures}
    for op in calls:
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                assert captured[id(tensor)].device[-5:] == op.device[-5:]
            elif op in calls[4:] and tensor.op in calls:
                assert tensor.shape.rank == 0


def blocks():
    layers = [keras.Input((4,)), keras.layers.Dense(8)]
    for _ in range(12):
        layers += [keras.layers.LayerNormalization(), keras.layers.Dense(8)]
    return [*layers, keras.layers.Dense(2)]


@pytest.mark.parametrize("name", ["AdamW", "loss_scale", "Muon"])
def test_step_of_twelve_blocks_has_few_operations_outside_functions(name):
    """Each is a kernel of its own on a GPU, hundreds of them a gap."""
    model = tfgpipe.GPipe(blocks(), 1, 4)
    model.compile(OPTIMIZERS[name](), "mse", jit_compile=True)
    waiting = [step_graph(model, np.ones((8, 4)), np.ones((8, 2)))]
    count = 0
    while waiting:
        for op in waiting.pop().get_operations():
            count += op.type not in ("Placeholder", "NoOp", "Const")
            if op.type == "If":
                waiting += [
                    internals.function_graph(op, op.get_attr(side).name)
                    for side in ("then_branch", "else_branch")
                ]
    assert count <= 200


NOT_ONE_BY_ONE = "loss_scale accumulation Nadam Muon Adafactor own".split()


@pytest.mark.parametrize(
    "name",
    quick(["Adam", "clipnorm", *NOT_ONE_BY_ONE], ["Adam", "clipnorm", "Muon"]),
)
def test_compiled_update_has_the_same_bits_on_any_number_of_devices(name):
    def after(k, compiles):
        return trained(OPTIMIZERS[name](), compiles, k, steps=2)

    first = after(1, True)
    for a, b in zip(first, after(3, True), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(first, after(1, False), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("optimizer", "are_alike"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), True),
        (keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), True),
        (keras.optimizers.Lion(), True),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), True),
        (keras.optimizers.Adam(), False),
        (keras.optimizers.Adagrad(), False),
        (keras.optimizers.RMSprop(), False),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), False),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_optimizers_that_take_slices_as_the_whole_are_known(
    optimizer, are_alike
):
    def after(as_given):
        one = type(optimizer).from_config(optimizer.get_config())
        variable = keras.Variable(np.ones((5, 2), "float32"))
        one.build([variable])
        for indices in ([0, 1, 1], [2, 2, 2], [1, 0, 4]):
            values = tf.random.stateless_normal([3, 2], indices[:2])
            slices = tf.IndexedSlices(values, tf.constant(indices), [5, 2])
            one.apply([as_given(slices)], [variable])
        return variable.numpy()

    found = after(lambda slices: slices)
    expected = after(tf.convert_to_tensor)
    assert update.updates_slices_alike(optimizer) == are_alike
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6) == are_alike


@pytest.mark.parametrize(
    ("optimizer", "is_told"), [("sgd", False), ("adam", True)]
)
def test_sparse_gradients_are_dense_where_all_is_compiled(
    optimizer, is_told, monkeypatch, recwarn
):
    def trained():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten()]
        layers.append(keras.layers.Dense(2))
        model = tfgpipe.GPipe(layers, 2, 2, layers_per_cell=[2, 1])
        model.compile(optimizer, "mse")
        for ids in ([[1, 2], [2, 2]], [[3, 3], [0, 1]]):
            model.train_on_batch(np.array(ids), np.ones((2, 2)))
        return model.get_weights()

    expected = trained()
    assert not recwarn.list
    monkeypatch.setattr(names_lib, "only_compiles", lambda names: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained()
    texts = [str(w.message) for w in caught if "sparse" in str(w.message)]
    assert bool(texts) == is_told
    assert all("embeddings' on " in text for text in texts)
    if not is_told:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
