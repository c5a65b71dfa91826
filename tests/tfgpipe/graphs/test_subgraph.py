"""Functions cut out of a traced graph."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import step_graph, types
from keras import layers as kl

import tfgpipe
from tfgpipe.graphs.cut import GraphCutter, WholeGraph


def traced(function, *specs):
    """The graph of a function, with its input and output tensors."""
    concrete = tf.function(function, autograph=False).get_concrete_function(
        *specs
    )
    inputs = concrete.inputs[: len(specs)]  # the others are captures
    return concrete.graph, inputs, concrete.structured_outputs


def cut(graph, options=None):
    """What cuts functions out of all of a graph."""
    names = {op.name for op in graph.get_operations()}
    options = options or {"autograph": False}
    return GraphCutter(WholeGraph(graph), names, options, "CPU")


def run(function, values, sums=()):
    """Calls a function that was cut, inside a graph as the engine does."""

    def step():
        known = {key: tf.constant(v) for key, v in values().items()}
        return function(known, [tf.constant(total) for total in sums])

    return tf.nest.map_structure(
        lambda t: t.numpy(), tf.function(step, autograph=False)()
    )


def kinds(subfunction):
    """The types of the operations of a function that was cut."""
    return set(types(subfunction._call._function.graph))


SPEC = tf.TensorSpec([2])


def test_cell_computes_once_what_its_layers_compute_alike():
    # Each attention makes the causal mask of its own.
    mask = kl.Lambda(
        lambda x: tf.where(
            tf.range(4)[:, None] >= tf.range(4), tf.ones([4, 4]), x
        )
    )
    model = tfgpipe.GPipe([mask, kl.Dense(4)] * 3, 1, 1)
    model.compile("sgd", "mse")
    graph = step_graph(model, np.ones([4, 4]), np.ones([4, 4]))
    assert types(graph).count("GreaterEqual") == 1
    assert types(graph).count("MatMul") > 3


def test_order_of_side_effects_is_kept():
    state = tf.Variable(1.0)

    def function(x):
        state.assign(state * 2.0)
        state.assign(state + 3.0)
        state.assign(state * 5.0)
        return x + state

    graph, (x,), y = traced(function, SPEC)
    part = cut(graph).function([x], [y], graph.control_outputs)
    found = run(part, lambda: {x.ref(): np.zeros(2, "float32")})
    assert float(state) == 25
    np.testing.assert_array_equal(found[0], [25, 25])


@pytest.mark.parametrize("body", ["while_loop", "scan", "cond", "map"])
def test_control_flow_and_its_gradient_survive(body):
    """Their functions are in the graph's library."""

    def function(x):
        if body == "while_loop":
            _, y = tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, y * tf.sin(y)), (0, x)
            )
        elif body == "scan":
            y = tf.scan(lambda a, b: a * tf.cos(b), x)
        elif body == "cond":
            y = tf.cond(x[0] > 0, lambda: tf.sin(x), lambda: x * 3.0)
        else:
            y = tf.map_fn(lambda v: v * v, x)
        return y, tf.gradients(y, x)[0]

    graph, (x,), outputs = traced(function, SPEC)
    part = cut(graph).function([x], list(outputs))
    value = np.array([0.5, 0.7], "float32")
    expected = tf.function(function, autograph=False)(tf.constant(value))
    for a, b in zip(run(part, lambda: {x.ref(): value}), expected):
        np.testing.assert_allclose(a, b, 1e-6)


def test_shapes_that_only_the_layer_knew_are_kept():
    def function(x):
        y = tf.numpy_function(lambda a: a, [x], tf.float32, stateful=False)
        y.set_shape([2])
        return y

    graph, (x,), y = traced(function, tf.TensorSpec([None]))
    part = cut(graph).function([x], [y])
    step = tf.function(lambda v: part({x.ref(): v}), autograph=False)
    concrete = step.get_concrete_function(tf.TensorSpec([None]))
    assert concrete.structured_outputs[0].shape == (2,)


# ------------------------------------------------------- what has to be carried


def test_size_enters_where_nothing_else_of_a_tensor_is_needed():
    tensors = {}

    def function(x):
        tensors["a"] = tf.sin(x)
        tensors["size"] = tf.size(tensors["a"])
        return tf.ones([tensors["size"]])

    graph, (x,), y = traced(function, tf.TensorSpec([None]))
    names = [op.name for op in graph.get_operations()]
    own = {*names[names.index(tensors["a"].op.name) + 1 :]}
    subgraphs = cut(graph)
    (entering,) = subgraphs.entering(own, [y], [x])
    assert entering is tensors["size"]
    assert kinds(subgraphs.function([entering], [y])) >= {"Fill"}
    assert subgraphs.entering(own, [y], [x, entering]) == []
    compiled = cut(graph, {"jit_compile": True}).entering(own, [y], [x])
    assert [u.op.type for u in compiled] == ["Sin"]


def test_shapes_and_views_are_repeated_rather_than_carried():
    tensors = {}

    def function(x):
        shape = tf.shape(x)
        tensors["view"] = tf.reshape(x, [shape[0] * 1, 1])
        tensors["far"] = tf.reshape(tf.sin(x), [-1, 1])
        return tensors["view"] + tensors["far"]

    graph, (x,), y = traced(function, tf.TensorSpec([None]))
    subgraphs = cut(graph)
    entering = subgraphs.entering({y.op.name}, [y], [x])
    types = {u.op.type for u in entering}
    assert "Sin" not in types  # its reshaped copy, or itself, but one of them
    assert len(entering) <= 2
    part = subgraphs.function([x, *entering], [y])
    assert "Sin" not in kinds(part)


def before(name, nodes):
    """The names of what runs before an operation of a function."""
    found, waiting = set(), [name]
    while waiting:
        for text in nodes[waiting.pop()].input:
            one = text.lstrip("^").split(":")[0]
            if one in nodes and one not in found:
                found.add(one)
                waiting.append(one)
    return found


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("rows", [1024, None, 4])
def test_backward_pass_goes_from_layer_to_layer(rows, keeps):
    """Where matrices are large: at most three products run side by side."""
    hidden, forward = [], set()

    def function(x, *weights):
        for weight in weights:
            hidden.append(tf.tanh((hidden[-1] if hidden else x) @ weight))
        operations = tf.compat.v1.get_default_graph().get_operations()
        forward.update(op.name for op in operations)
        return tf.gradients(hidden[-1], [x, *weights])

    specs = [tf.TensorSpec([rows, 128])] + 6 * [tf.TensorSpec([128, 128])]
    graph, given, gradients = traced(function, *specs)
    names = {op.name for op in graph.get_operations()}
    cutter = GraphCutter(
        WholeGraph(graph), names, {"autograph": False}, "CPU", names - forward
    )
    part = cutter.function([*given, *(hidden if keeps else ())], gradients)
    (inner,) = part._call._function.graph.as_graph_def().library.function
    nodes = {node.name: node for node in inner.node_def}
    products = [name for name in nodes if nodes[name].op == "MatMul"]
    assert len(products) == (12 if keeps else 18)
    earlier = {name: before(name, nodes) for name in products}
    at_once = [
        group
        for group in itertools.combinations(products, 4)
        if not any(a in earlier[b] for a, b in itertools.permutations(group, 2))
    ]
    assert bool(at_once) == (rows == 4)


def test_sums_are_added_in_order_whatever_memory_is_free():
    """AddN would begin with the last: the others are still needed."""
    tensors = {}

    def function(a, b, c):
        a, b, c = tensors["sources"] = [2 * x for x in (a, b, c)]
        tensors["sum"] = tf.add_n([a, b, c])
        return tensors["sum"]

    spec = tf.TensorSpec([64])
    graph, inputs, _ = traced(function, spec, spec, spec)
    a, b, _ = tensors["sources"]
    options = {"experimental_attributes": {"_noinline": True}}
    part = cut(graph, options).function(inputs, [tensors["sum"], a, b])
    values = np.random.default_rng(0).normal(size=(3, 64)).astype("float32")
    known = {t.ref(): value for t, value in zip(inputs, values)}
    x, y, z = 2 * values
    found = run(part, lambda: known)[0]
    np.testing.assert_array_equal(found, x + y + z)
    assert (found != z + y + x).any()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_biases_of_convolutions_get_their_own_gradients(schedule):
    """In float32, in which TensorFlow fuses them with those of filters.

    Not those of very small images.
    """
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8, 8, 8, 4)).astype("float32") for _ in range(2))

    def trained(make):
        keras.utils.set_random_seed(1)
        layers = [kl.Conv2D(4, 3, padding="same") for _ in range(6)]
        model = make([keras.Input((8, 8, 4)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, epochs=2, verbose=0)
        return model.get_weights()

    found = trained(
        lambda layers: tfgpipe.GPipe(layers, 2, 2, schedule=schedule)
    )
    for a, b in zip(found, trained(keras.Sequential), strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6)
