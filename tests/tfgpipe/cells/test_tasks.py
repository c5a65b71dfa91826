"""The tasks of a cell give the gradients of a plain `tf.GradientTape`."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import operations, step_graph, types
from keras import layers as kl
from kinds import Block, step
from own_layers import Fork, Join
from quick import quick
from traces import Run, Watched, differentiated, tasks_of, traced

import tfgpipe
from tfgpipe.graphs import cut

ROWS = 6


def dense():
    return [kl.Dense(5, "tanh"), kl.LayerNormalization(), kl.Dense(3, "gelu")]


def convolution():
    return [kl.Conv1D(4, 3, activation="relu"), kl.BatchNormalization()]


def normalized():
    """The gradients of offsets are part of those of the inputs."""
    return [layer for _ in range(3) for layer in convolution()]


def recurrent():
    return [kl.GRU(2)]


def nests():
    return [kl.Dense(5), Fork(), step(), step(), Join()]


class Penalized(kl.Dense):
    def call(self, x):
        y = super().call(x)
        self.add_loss(keras.ops.mean(y * y))
        return y


CELLS = {
    "dense": (dense, (4,)),
    "convolution": (convolution, (6, 4)),
    "recurrent": (recurrent, (5, 3)),
    "block": (lambda: [Block(4)], (3, 4)),
    "dropout": (lambda: [kl.Dense(8), kl.Dropout(0.5), kl.Dense(8)], (4,)),
    "nests": (nests, (4,)),
    "losses": (lambda: [Penalized(4), kl.Dense(2), Penalized(3)], (4,)),
    "normalized": (normalized, (8, 4)),
    "weightless": (lambda: [kl.Activation("gelu")], (4,)),
    "frozen": (lambda: [kl.Dense(4, trainable=False), kl.ReLU()], (4,)),
}

CARRYING = {
    *cut.CHEAP,
    "IdentityN",
    "OptionalFromValue",
    "OptionalGetValue",
    "PartitionedCall",
}


def prepared(make, shape, is_watched=True):
    """Layers with their variables, the inputs, and the graph of both.

    They are the last cell; if their inputs have gradients, behind another.
    """
    keras.utils.set_random_seed(2)
    x = tf.constant(
        np.random.default_rng(0).standard_normal((ROWS, *shape)),
        keras.config.floatx(),
    )
    layers, y = list(make()), x
    for layer in layers:
        y = layer(y)  # creates the variables
    spec = tf.TensorSpec(x.shape, x.dtype)
    before = [Watched(spec)] if is_watched else []
    places = [0] * len(before) + [len(before)] * len(layers)
    made = differentiated(traced([*before, *layers], spec, places))
    return layers, x, made


def seeds(handed_out, losses):
    """Some gradients of a cell's outputs and losses."""
    rng = np.random.default_rng(1)
    dy = [
        tf.constant(rng.standard_normal(t.shape), t.dtype)
        if t.dtype.is_floating
        else None
        for t in handed_out
    ]
    return dy, [tf.constant(0.7, loss.dtype) for loss in losses]


def in_graph(function):
    """What a function returns that the engine would call in a graph."""
    return tf.function(function, autograph=False)()


def plain(layers, x):
    """Outputs, and gradients by inputs and weights: one tape around all."""
    state = [(v, v.numpy()) for layer in layers for v in layer.variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for layer in layers:
            y = layer(y, training=True)
        losses = [loss for layer in layers for loss in layer.losses]
    for variable, value in state:
        variable.assign(value)
    outputs = keras.tree.flatten(y)
    dy, dlosses = seeds(outputs, losses)
    pairs = [(t, d) for t, d in zip(outputs, dy) if d is not None]
    weights = [v.value for layer in layers for v in layer.trainable_variables]
    dx, *dw = tape.gradient(
        [t for t, _ in pairs] + losses,
        [x, *weights],
        output_gradients=[d for _, d in pairs] + dlosses,
    )
    return [*outputs, *losses], [dx], dw


def as_arrays(values):
    return [
        None if v is None else tf.convert_to_tensor(v).numpy() for v in values
    ]


def begun(made, tasks, x, keeps=True):
    """A micro-batch whose forward tasks have run."""
    step = Run(made, tasks, x)
    step.forward(keeps)
    step.begin_backward(*seeds(made.traced.handed_out, made.traced.losses))
    return step


def run(name, halves, keeps, sums=False):
    """Outputs and gradients by the tasks of a cell."""
    layers, x, made = prepared(*CELLS[name])
    model, places = made.traced, {}
    for i, use in enumerate(model.uses):
        places[id(use.variable)] = i
    weights = [v for layer in layers for v in layer.trainable_variables]

    def step():
        one = begun(made, tasks_of(made), x, keeps)
        if not keeps:
            one.recompute()
        if sums:  # the same micro-batch twice
            kept = dict(one.kept)
            one.backward()
            one.kept = kept
        one.backward(m=1, halves=halves)
        dw = one.gradients()
        return (
            one.of([*model.outputs, *model.losses]),
            one.dx(),
            [dw[places[id(v)]] for v in weights],
        )

    outputs, dx, dw = in_graph(step)
    return outputs, dx, dw, layers, x


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_a_plain_tape(name, keeps):
    outputs, dx, dw, layers, x = run(name, False, keeps)
    expected, plain_dx, plain_dw = plain(layers, x)
    pairs = zip(
        as_arrays([*outputs, *dx, *dw]),
        as_arrays([*expected, *plain_dx, *plain_dw]),
        strict=True,
    )
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b, 1e-12, 1e-14)


@pytest.mark.parametrize(
    "name",
    quick(
        sorted(set(CELLS) - {"weightless", "frozen"}),
        ["block", "normalized"],
    ),
)
def test_halves_equal_the_whole_bit_by_bit(name):
    _, *whole, _, _ = run(name, halves=False, keeps=False)
    for keeps in (True, False):
        _, *halves, _, _ = run(name, halves=True, keeps=keeps)
        flat = [as_arrays(tf.nest.flatten(part)) for part in (whole, halves)]
        for a, b in zip(*flat, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("halves", [False, True])
def test_gradients_are_added_to_the_sum_so_far(halves):
    _, _, once, _, _ = run("dense", halves, keeps=True)
    _, _, twice, _, _ = run("dense", halves, keeps=True, sums=True)
    for a, b in zip(as_arrays(once), as_arrays(twice), strict=True):
        np.testing.assert_array_equal(2 * a, b)


@pytest.mark.parametrize("name", ["weightless", "frozen"])
def test_cell_without_weights_has_no_gradients_of_weights(name):
    _, dx, dw, layers, x = run(name, halves=True, keeps=True)
    _, plain_dx, _ = plain(layers, x)
    assert dw == []
    np.testing.assert_allclose(dx[0], plain_dx[0], 1e-6)


def test_each_half_has_its_own_products():
    """The first half has the products by the kernels, the second the others."""
    layers = [kl.Dense(5, "tanh") for _ in range(3)]
    _, x, made = prepared(lambda: layers, (4,))
    tasks = tasks_of(made)

    def step():
        one = begun(made, tasks, x)
        kept = dict(one.kept)
        one.backward(halves=True)
        one.kept, one.sums = kept, {}
        one.backward()
        return one.dx()

    in_graph(step)
    products = {
        str(key): types(function._call._function.graph).count("MatMul")
        for key, function in tasks[-1].functions._functions.items()
    }
    assert sorted(products.values()) == [3, 3, 3, 6]


@pytest.mark.parametrize("name", CELLS)
def test_no_function_computes_what_another_one_has_computed(name):
    _, x, made = prepared(*CELLS[name])
    tasks = tasks_of(made)

    def step():
        one = begun(made, tasks, x)
        one.backward(halves=True)
        return one.dx()

    in_graph(step)
    found = tasks[-1].functions._functions
    made = [
        {
            op.name
            for op in operations(function._call._function.graph)
            if op.type not in CARRYING and op.inputs
        }
        for function in found.values()
    ]
    assert len(made) == 3
    for one, other in itertools.combinations(made, 2):
        assert not one & other


def kept(make, shape, rows):
    """What makes the tensors that a cell keeps; but for integers."""
    spec = tf.TensorSpec((rows, *shape))
    tasks = tasks_of(differentiated(traced(make(), spec)))
    found = tasks[-1].functions.kept.tensors
    return sorted(t.op.type for t in found if t.dtype.is_floating)


@pytest.mark.parametrize("name", ["dense", "block"])
def test_as_much_is_kept_where_the_number_of_rows_is_not_known(name):
    """Gradients ask for shapes then: those are kept, and not what has them."""
    make, shape = CELLS[name]
    assert kept(make, shape, None) == kept(make, shape, ROWS)


def test_cell_whose_inputs_need_no_gradient_is_not_split():
    for needs_dx in (False, True):
        *_, made = prepared(*CELLS["dense"], is_watched=needs_dx)
        facts = tasks_of(made)[-1].facts(True, needs_dx)
        assert facts.has_halves == needs_dx


# ----------------------------------------------------- casts of weights
def casts(m, **kwargs):
    """Casts to bfloat16 in a training step: outside of functions, and all."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [kl.Dense(16, "relu", name=f"dense_{i}") for i in range(4)]
    model = tfgpipe.GPipe(layers, 2, m, **kwargs)
    model.compile("sgd", "mse")
    ones = np.ones((8, 16), "float32")
    graph = step_graph(model, ones, ones)

    def count(operations):
        return [
            op
            for op in operations
            if op.type == "Cast" and op.outputs[0].dtype == tf.bfloat16
        ]

    return len(count(graph.get_operations())), len(count(operations(graph)))


@pytest.mark.parametrize(
    ("schedule", "remat"), [("gpipe", "always"), ("zero_bubble", "never")]
)
def test_weights_are_cast_once_a_mini_batch(schedule, remat):
    found = {m: casts(m, schedule=schedule, remat=remat) for m in (1, 2, 8)}
    assert [outside for outside, _ in found.values()] == [8, 8, 8]
    # In functions, the inputs are cast, once again where they are recomputed,
    # and the gradient of the loss.
    for m, (outside, total) in found.items():
        assert total - outside <= 3 * m
