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


def variables(dtype, k=3):
    rng = np.random.default_rng(0)
    made = []
    for i, shape in enumerate(SHAPES):
        with tf.device(f"CPU:{i % k}"):
            value = rng.standard_normal(shape)
            made.append(keras.Variable(value, dtype=dtype, name=f"v{i}"))
    return made


def gradients(step, dtype, sparse):
    rng = np.random.default_rng(step + 1)
    found = [tf.constant(rng.standard_normal(s), dtype) for s in SHAPES]
    if sparse:  # with a row twice, as an embedding gives
        values = tf.constant(rng.standard_normal((3, 4)), dtype)
        found[2] = tf.IndexedSlices(
            values, tf.constant([2, 0, 2]), tf.constant([3, 4])
        )
    return found


def trained(optimizer, ours, dtype, sparse=False, steps=4, compiles=False, k=3):
    """Values and slots after some steps, each of them in a graph."""
    weights = variables(dtype, k)
    optimizer.build(weights)
    for variable in weights:  # as `build_optimizer` does
        own = [
            slot
            for one in internals.with_inner(optimizer)
            if type(one) is keras.optimizers.Adafactor
            for slot in internals.slots(one, variable)
        ]
        placement.create_or_move(own, variable.value.device)

    @tf.function(autograph=False)
    def step(found):
        pairs = list(zip(found, weights))
        if not ours:
            optimizer.apply_gradients(pairs)
            return
        update.update_on_devices(optimizer, pairs, compiles)

    for i in range(steps):
        step(gradients(i, dtype, sparse))
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


def decaying():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


OPTIMIZERS = {
    **{
        name: getattr(keras.optimizers, name)
        for name in (
            "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lion Nadam "
            "RMSprop SGD Muon Lamb"
        ).split()
    },
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "centered": lambda: keras.optimizers.RMSprop(centered=True, momentum=0.5),
    "momentum": lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True),
    "schedule": lambda: keras.optimizers.Adam(decaying()),
    "decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "average": lambda: keras.optimizers.SGD(
        0.1, 0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: keras.optimizers.Nadam(
        0.1, gradient_accumulation_steps=2
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "scaled_nadam": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Nadam(0.1), initial_scale=4.0
    ),
    "own": lambda: Slow(0.1, momentum=0.5),
    "own_assign": lambda: Halving(0.1),
    "own_attribute": with_own_assign,
    "subclass": lambda: Same(0.1),
}
DENSE_ONLY = {"Muon", "accumulation", "own", "own_assign"}  # no sparse ones


# Those whose updates are of a kind of their own. A pipeline trains with each
# optimizer of Keras in tests/promises/test_optimizers.py.
QUICK = (
    "Adam Adafactor Muon SGD momentum schedule clipnorm average accumulation "
    "scaled_nadam own own_assign own_attribute subclass"
).split()


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_update_is_that_of_keras(name):
    """Of dense gradients, and of a sparse one if Keras takes it."""
    make, sparse = OPTIMIZERS[name], name not in DENSE_ONLY
    keras.config.set_floatx("float64")
    found = trained(make(), True, "float64", sparse)
    expected = trained(make(), False, "float64", sparse)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-12, 1e-14)


def test_update_of_half_precision_variables_is_that_of_keras():
    """Keras casts where the optimizer's slots have another precision."""
    for name in ("Adam", "momentum"):
        make = OPTIMIZERS[name]
        found = trained(make(), True, "bfloat16")
        expected = trained(make(), False, "bfloat16")
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                a.astype("float32"), b.astype("float32"), 2e-2, 1e-2
            )


class Given(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is kept in a variable, and assigned by the schedule."""

    def __init__(self, rate, of):
        self.rate = rate
        self.of = of

    def __call__(self, step):
        self.rate.assign(1 / (tf.cast(step, self.rate.dtype) + 2))
        return self.of(self.rate)


@pytest.mark.parametrize("name", ["tensorflow", "keras", "value", "read"])
@pytest.mark.parametrize("cls", ["Adam", "SGD", "Lamb"])
def test_rate_that_is_a_variable_is_that_of_keras(cls, name):
    make = keras.Variable if name != "tensorflow" else tf.Variable
    of = {
        "value": lambda rate: rate.value,
        "read": lambda rate: tf.convert_to_tensor(rate.value),
    }.get(name, lambda rate: rate)

    def optimizer():
        rate = make(0.5, dtype="float64")
        return getattr(keras.optimizers, cls)(Given(rate, of))

    keras.config.set_floatx("float64")
    found = trained(optimizer(), True, "float64")
    expected = trained(optimizer(), False, "float64")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-12, 1e-14)


# ------------------------------------------------------------------ how often
def counting(optimizer):
    """Counts how often Python runs the optimizer's update."""
    counts = []
    plain = type(optimizer).update_step

    def counted(self, *args):
        counts.append(args)
        return plain(self, *args)

    return counts, counted


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Ftrl", "subclass"])
def test_equal_weights_share_one_trace(name, monkeypatch):
    optimizer = OPTIMIZERS[name]()
    counts, counted = counting(optimizer)
    cls = next(c for c in type(optimizer).__mro__ if "update_step" in vars(c))
    alike = {*update._ALIKE, counted}
    monkeypatch.setattr(cls, "update_step", counted)
    monkeypatch.setattr(update, "_ALIKE", alike)
    trained(optimizer, True, "float32", steps=2)
    assert len(counts) == len({*SHAPES})  # whatever their devices


@pytest.mark.parametrize("name", ["own", "Muon", "Lamb"])
def test_optimizers_not_known_to_be_alike_go_the_way_of_keras(
    name, monkeypatch
):
    optimizer = OPTIMIZERS[name]()
    counts, counted = counting(optimizer)
    monkeypatch.setattr(type(optimizer), "update_step", counted)
    trained(optimizer, True, "float32", steps=1)
    assert len(counts) == len(SHAPES)


def test_instance_gets_its_methods_back():
    def fail(variable, value):
        raise RuntimeError("out of luck")

    optimizer = keras.optimizers.Adam()
    weights = variables("float32")
    optimizer.build(weights)
    optimizer.assign_sub = fail
    before = {**vars(optimizer)}
    pairs = list(zip(gradients(0, "float32", False), weights))
    step = tf.function(
        lambda: update.update_on_devices(optimizer, pairs), autograph=False
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        step()
    assert vars(optimizer) == before


# --------------------------------------------------------------------- places
def calls_of(optimizer, compiles=False, k=3):
    """The calls of functions in an update, and all other operations."""
    weights = variables("float32", k)
    optimizer.build(weights)

    def step(*found):
        pairs = list(zip(found, weights))
        update.update_on_devices(optimizer, pairs, compiles)

    traced = tf.function(step, autograph=False)
    graph = traced.get_concrete_function(*gradients(0, "float32", False)).graph
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
        optimizer = OPTIMIZERS[name]()
        return trained(
            optimizer, True, "float32", steps=2, compiles=compiles, k=k
        )

    first = after(1, True)
    for a, b in zip(first, after(3, True), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(first, after(1, False), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_hosts_of_devices_are_their_cpus():
    one = names_lib.host_of("/job:worker/replica:0/task:3/device:GPU:2")
    assert one == "/job:worker/replica:0/task:3/device:CPU:0"
    assert names_lib.host_of("/device:CPU:5").endswith("CPU:0")


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
