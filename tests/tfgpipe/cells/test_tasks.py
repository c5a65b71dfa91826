"""What the functions of a cell compute, and what it keeps."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import operations, step_graph, types
from keras import layers as kl
from kinds import Block, step
from own_layers import Fork, Join
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


def functions_of(make, shape, *ways):
    """What a cell behind another one is cut into, to go back in these ways.

    With the names of the operations of each function.
    """
    x = tf.random.normal((ROWS, *shape))
    layers, y = list(make()), x
    for layer in layers:
        y = layer(y)  # creates the variables
    spec = tf.TensorSpec(x.shape, x.dtype)
    places = [0] + [1] * len(layers)
    made = differentiated(traced([Watched(spec), *layers], spec, places))
    tasks = tasks_of(made)

    @tf.function(autograph=False)
    def step():
        micro_batch = Run(made, tasks, x)
        micro_batch.forward()
        micro_batch.begin_backward(
            [
                tf.ones_like(t) if t.dtype.is_floating else None
                for t in micro_batch.of(made.traced.handed_out)
            ],
            [tf.ones_like(t) for t in made.traced.losses],
        )
        kept = dict(micro_batch.kept)
        for halves in ways:
            micro_batch.kept, micro_batch.sums = dict(kept), {}
            micro_batch.backward(halves=halves)
        return micro_batch.dx()

    step()
    return [
        function._call._function.graph
        for function in tasks[-1].functions._functions.values()
    ]


def test_each_half_has_its_own_products():
    """The first half has the products by the kernels, the second the others."""
    graphs = functions_of(
        lambda: [kl.Dense(5, "tanh") for _ in range(3)], (4,), True, False
    )
    products = [types(graph).count("MatMul") for graph in graphs]
    assert sorted(products) == [3, 3, 3, 6]


@pytest.mark.parametrize("name", CELLS)
def test_no_function_computes_what_another_one_has_computed(name):
    computed = [
        {
            op.name
            for op in operations(graph)
            if op.type not in CARRYING and op.inputs
        }
        for graph in functions_of(*CELLS[name], True)
    ]
    assert len(computed) == 3
    for a, b in itertools.combinations(computed, 2):
        assert not a & b


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
