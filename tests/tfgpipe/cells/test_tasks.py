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

import tfgpipe
from tfgpipe.boundary import Boundary, CellArguments, structure_of
from tfgpipe.cells import cell
from tfgpipe.cells.cell import Cell
from tfgpipe.cells.function import CellFunction
from tfgpipe.cells.tracer import Tracer
from tfgpipe.graphs import cut
from tfgpipe.micro_batches import MicroBatches

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


def prepared(make, shape):
    """A cell's function, and the arguments of a micro-batch."""
    keras.utils.set_random_seed(2)
    x = tf.constant(
        np.random.default_rng(0).standard_normal((ROWS, *shape)),
        keras.config.floatx(),
    )
    function = cell_function(tuple(make()), x)
    weights, state = tf.nest.map_structure(
        lambda v: tf.identity(v.value), (function.weights, function.state)
    )
    arguments = CellArguments(Boundary.of(x), weights, state, None)
    return function, arguments


def tasks_of(function, arguments, has_gradient, needs_dx=True):
    """The tasks of a cell."""
    tracer = Tracer(jit_compile=False)
    x = arguments.inputs.tensors[0]
    of_rows = MicroBatches(x, 1).spec
    traced = tracer.trace(
        [function], structure_of(x), [arguments.specs(of_rows)], of_rows
    )
    cells = tracer.differentiate(traced, [True], has_gradient)
    (tasks,) = tracer.tasks(cells, [needs_dx])
    return tasks


def cell_function(layers, x):
    for layer in layers:
        x = layer(x)  # creates the variables
    steps = [cell.LayerCall(layer) for layer in layers]
    return CellFunction(Cell(0, steps, ["CPU:0"]), True, None, True)


def seeds(output):
    """Some gradients of a cell's outputs and losses."""
    rng = np.random.default_rng(1)
    dy = [
        tf.constant(rng.standard_normal(t.shape), t.dtype)
        if t.dtype.is_floating
        else None
        for t in output.tensors
    ]
    return dy, [tf.constant(0.7, loss.dtype) for loss in output.losses]


def in_graph(function):
    """What a function returns that the engine would call in a graph."""
    return tf.function(function, autograph=False)()


def plain(function, arguments, structure):
    """Gradients by inputs and weights: one tape around the layers."""
    sources = arguments.sources(with_inputs=True)
    with tf.GradientTape() as tape:
        tape.watch(sources)
        output, _ = function(arguments, structure)
    dy, dlosses = seeds(output)
    targets = [t for t in output.tensors if t.dtype.is_floating]
    found = tape.gradient(
        targets + output.losses,
        sources,
        output_gradients=[d for d in dy if d is not None] + dlosses,
    )
    return output, found[:1], found[1:]


def as_arrays(values):
    return [
        None if v is None else tf.convert_to_tensor(v).numpy() for v in values
    ]


def packed(tasks, arguments):
    """The arguments as tasks take them."""
    weights = [
        tf.cast(weight, dtype)
        for weight, dtype in zip(
            tf.nest.flatten(arguments.weights), tasks.weight_dtypes
        )
    ]
    weights = tf.nest.pack_sequence_as(arguments.weights, weights)
    return arguments._replace(weights=tasks.pack_weights(weights))


def run(name, halves, keeps, sums=False):
    """Outputs and gradients by the tasks of a cell."""
    function, arguments = prepared(*CELLS[name])

    def step():
        dy, dlosses = seeds(plain(function, arguments, 0)[0])
        has = [d is not None for d in dy]
        tasks = tasks_of(function, arguments, has)
        values = packed(tasks, arguments)
        output, kept = tasks.forward(values, keeps)()
        recompute = None if keeps else tasks.recompute(values, kept)
        if recompute is not None:
            kept = recompute()
        known = None
        given = values, kept, dy, dlosses
        if sums:  # the same micro-batch twice
            _, known = tasks.backward(*given, None, 0)()
        if halves:
            dx, kept = tasks.input_gradient(*given)()
            dw = tasks.weight_gradient(values, kept, dy, dlosses, known, 1)()
        else:
            dx, dw = tasks.backward(*given, known, 1)()
        return output, (dx, [g.finished() for g in tasks.unpack_sums(dw)])

    output, (dx, dw) = in_graph(step)
    return output, dx, dw, function, arguments


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_a_plain_tape(name, keeps):
    output, dx, dw, function, arguments = run(name, False, keeps)
    expected, plain_dx, plain_dw = plain(function, arguments, 0)
    pairs = zip(
        as_arrays([*output.tensors, *output.losses, *dx, *dw]),
        as_arrays([*expected.tensors, *expected.losses, *plain_dx, *plain_dw]),
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
    _, dx, dw, function, arguments = run(name, halves=True, keeps=True)
    _, plain_dx, _ = plain(function, arguments, 0)
    assert dw == []
    np.testing.assert_allclose(dx[0], plain_dx[0], 1e-6)


def test_each_half_has_its_own_products():
    """The first half has the products by the kernels, the second the others."""
    layers = [kl.Dense(5, "tanh") for _ in range(3)]
    function, arguments = prepared(lambda: layers, (4,))
    tasks = tasks_of(function, arguments, [True])

    def step():
        values = packed(tasks, arguments)
        output, kept = tasks.forward(values, True)()
        dy, dlosses = seeds(output)
        dx, both = tasks.input_gradient(values, kept, dy, dlosses)()
        tasks.weight_gradient(values, both, dy, dlosses, None, 0)()
        tasks.backward(values, kept, dy, dlosses, None, 0)()
        return dx

    in_graph(step)
    products = {
        str(key): types(function._call._function.graph).count("MatMul")
        for key, function in tasks.graph._functions.items()
    }
    assert sorted(products.values()) == [3, 3, 3, 6]


@pytest.mark.parametrize("name", CELLS)
def test_no_function_computes_what_another_one_has_computed(name):
    function, arguments = prepared(*CELLS[name])

    def step():
        dy, dlosses = seeds(plain(function, arguments, 0)[0])
        has = [d is not None for d in dy]
        tasks = tasks_of(function, arguments, has)
        values = packed(tasks, arguments)
        _, kept = tasks.forward(values, True)()
        _, both = tasks.input_gradient(values, kept, dy, dlosses)()
        tasks.weight_gradient(values, both, dy, dlosses, None, 0)()
        found.update(tasks.graph._functions)
        return [d for d in dy if d is not None]

    found = {}
    in_graph(step)
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


def test_cell_whose_inputs_need_no_gradient_is_not_split():
    given = prepared(*CELLS["dense"])
    assert not tasks_of(*given, [True], needs_dx=False).facts(True).has_halves
    assert tasks_of(*given, [True]).facts(True).has_halves


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
