import collections
import gc
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import step_graph, tasks
from keras import layers as kl
from quick import quick

import tfgpipe
from tfgpipe.schedules.orders import CHUNKS, SCHEDULES, devices_of_cells

REMAT = ("always", "except_last", "never")


def graph_of(layers, k, m, x, y, **kwargs):
    """The traced training step of a model."""
    model = tfgpipe.GPipe(layers, k, m, **kwargs)
    model.compile("sgd", "mse")
    return step_graph(model, x, y)


def ones(*shape):
    return np.ones(shape, "float32")


# ------------------------------------------------------------------- tracing
@pytest.mark.parametrize(
    ("remat", "again"), [("always", 5), ("except_last", 4), ("never", 0)]
)
def test_graph_has_one_call_for_each_task(remat, again):
    layers = [kl.Dense(4, activation="tanh") for _ in range(6)]
    graph = graph_of(layers, 3, 5, ones(10, 4), ones(10, 4), remat=remat)
    assert len(tasks(graph)) == 3 * (5 + again + 5)


def test_frozen_cells_at_the_beginning_have_no_backward_pass():
    layers = [kl.Dense(4, trainable=False), kl.Dense(4, trainable=False)]
    layers += [kl.Dense(4), kl.Dense(4)]
    graph = graph_of(layers, 4, 3, ones(6, 4), ones(6, 4), remat="always")
    per_device = collections.Counter(op.device[-5:] for op in tasks(graph))
    # the third cell needs nothing of its forward pass but its inputs
    assert [per_device[f"CPU:{k}"] for k in range(4)] == [3, 3, 6, 9]


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [("gpipe", [12] * 3), ("1f1b", [12] * 3), ("zero_bubble", [12, 16, 16])],
)
def test_tasks_of_a_device_are_chained_in_the_order_of_the_schedule(
    schedule, counts
):
    layers = [kl.Dense(4, activation="tanh") for _ in range(3)]
    graph = graph_of(
        layers, 3, 4, ones(8, 4), ones(8, 4), remat="always", schedule=schedule
    )
    for k in range(3):
        # what a loss counts, a scalar, is computed ahead and is no task
        own = [
            op
            for op in tasks(graph)
            if op.device.endswith(f"CPU:{k}")
            and any(t.shape.rank or t.dtype == tf.variant for t in op.outputs)
        ]
        assert len(own) == counts[k]
        for before, after in itertools.pairwise(own):
            followed = [*after.control_inputs, *(t.op for t in after.inputs)]
            assert before in followed


# ----------------------------------------------------------- memory by schedule
def held(schedule, device, kinds):
    """Most micro-batches between their forward task and one of these kinds."""
    now = most = 0
    for kind, _, _ in schedule.tasks[device]:
        now += (kind == "forward") - (kind in kinds)
        most = max(most, now)
    return most


def watched(now, most, device):
    """A layer that counts what has gone forward through it, but not back."""

    def count(x, step):
        now[device] += step
        most[device] = max(most[device], now[device])
        return x

    class Watched(kl.Layer):
        def call(self, x):
            @tf.custom_gradient
            def identity(x):
                def run(x, step):
                    y = tf.numpy_function(
                        lambda a: count(a, step), [x], x.dtype, stateful=False
                    )
                    y.set_shape(x.shape)
                    return y

                return run(x, 1), lambda dy: run(dy, -1)

            return identity(x)

    return Watched()


@pytest.mark.parametrize(
    "name", quick(SCHEDULES, ["gpipe", "1f1b", "zero_bubble_v"])
)
def test_devices_hold_as_many_micro_batches_as_the_schedule_says(name):
    """Counted while the step runs."""
    now, most = collections.Counter(), collections.Counter()
    m, chunks = 8, CHUNKS[name] or 2
    devices = 4 // chunks
    places = devices_of_cells(name, devices, chunks)
    layers = []
    for k in range(4):
        layers += [kl.Dense(4), watched(now, most, places[k])]
    model = tfgpipe.GPipe(
        layers,
        4,
        m,
        layers_per_cell=[2] * 4,
        schedule=name,
        remat="never",
        devices=[f"CPU:{d}" for d in range(devices)],
    )
    model.compile("sgd", "mse")
    model.train_on_batch(ones(16, 4), ones(16, 4))  # with a trial of layers
    now.clear()
    most.clear()
    model.train_on_batch(ones(16, 4), ones(16, 4))
    schedule = SCHEDULES[name](devices, m, chunks)
    first_gradient = ("backward", "input_gradient")
    expected = [held(schedule, d, first_gradient) for d in range(devices)]
    assert [most[d] for d in range(devices)] == expected
    assert set(now.values()) == {0}
    if name in ("1f1b", "zero_bubble"):  # and not 8 each, as gpipe
        assert expected == [4, 3, 2, 1]


# -------------------------------------------------------- re-materialisation
def counted(counts, name):
    """A layer that counts how often a device computes it."""

    def count(x):
        counts[name] += 1
        return x

    class Counted(kl.Layer):
        def call(self, x):
            @tf.custom_gradient
            def identity(x):
                y = tf.numpy_function(count, [x], x.dtype, stateful=False)
                y.set_shape(x.shape)
                # the gradient needs the output, as that of tanh does
                return y, lambda dy: dy + 0.0 * y

            return identity(x)

    return Counted(name=name)


@pytest.mark.parametrize(
    ("remat", "forward"), [("always", 8), ("except_last", 7), ("never", 4)]
)
def test_remat_computes_each_cell_as_often_as_it_promises(remat, forward):
    counts = collections.Counter()
    layers = []
    for k in range(3):
        layers += [(kl.Dense(4), 1.0), (counted(counts, f"c{k}"), 1.0)]
    model = tfgpipe.GPipe(layers, 3, 4, remat=remat, layers_per_cell=[2, 2, 2])
    model.compile("sgd", "mse")
    model.train_on_batch(ones(8, 4), ones(8, 4))
    counts.clear()
    model.train_on_batch(ones(8, 4), ones(8, 4))
    assert dict(counts) == {"c0": forward, "c1": forward, "c2": forward}


@pytest.mark.parametrize(
    ("remat", "kept"), [("always", 0), ("except_last", 1), ("never", 4)]
)
def test_remat_frees_all_but_the_boundary(remat, kept):
    """A forward task that will be recomputed returns one activation."""
    block = keras.Sequential([kl.Dense(32, "gelu"), kl.Dense(4, "gelu")])
    block.build((None, 4))
    layers = [kl.Dense(4), block, kl.Dense(4)]
    cut = {"layers_per_cell": [1, 1, 1], "remat": remat}
    graph = graph_of(layers, 3, 4, ones(8, 4), ones(8, 4), **cut)
    middle = [op for op in tasks(graph) if op.device.endswith("CPU:1")][:4]
    sizes = [
        sum(t.shape.num_elements() for t in op.outputs if t.consumers())
        for op in middle
    ]
    assert [size > 8 for size in sizes].count(True) == kept
    assert sizes.count(8) == 4 - kept  # 2 rows of 4


def test_activations_of_the_last_layer_do_not_outlive_their_micro_batch():
    """With a loss of rows, no tensor of all rows' outputs is ever made."""
    layers = [kl.Dense(4), kl.Dense(100)]
    graph = graph_of(layers, 2, 4, ones(8, 4), ones(8, 100), remat="always")
    forward = [op for op in tasks(graph) if op.device.endswith("CPU:1")][:4]
    for op in forward:
        wide = [t for t in op.outputs if 100 in t.shape.as_list()]
        assert [t for t in wide if t.consumers()] == []


# ----------------------------------------------------------------- gradients
class Spy(keras.optimizers.SGD):
    """Keeps the gradients it is asked to apply."""

    def apply_gradients(self, pairs):
        pairs = list(pairs)
        self.kinds = [type(g).__name__ for g, _ in pairs]
        return super().apply_gradients(pairs)


@pytest.mark.parametrize("remat", REMAT)
def test_gradient_of_an_embedding_stays_sparse(remat):
    model = tfgpipe.GPipe([kl.Embedding(50, 4), kl.Dense(2)], 2, 2, remat=remat)
    model.compile(Spy(), "mse")
    model.train_on_batch(np.ones((4, 3), "int32"), ones(4, 3, 2))
    assert model.optimizer.kinds == ["IndexedSlices"] + ["SymbolicTensor"] * 2


class Constant(kl.Layer):
    """Has a weight that the loss does not depend on."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(3,))

    def call(self, x):
        return x


def test_weight_without_gradient_warns_as_in_keras():
    model = tfgpipe.GPipe([kl.Dense(4), Constant(), kl.Dense(2)], 3, 2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="Gradients do not exist for"):
        model.train_on_batch(ones(4, 4), ones(4, 2))
    np.testing.assert_array_equal(model.sequence[0].kernel.shape, (4, 4))


class Branch(kl.Layer):
    """Has a function in its graph that TensorFlow knows by name only."""

    def call(self, x):
        positive = tf.reduce_sum(x) > 0.0
        return tf.cond(positive, lambda: x * 2.0, lambda: x * 3.0)


@pytest.mark.filterwarnings("ignore:Layer 'branch' mixes the rows")
def test_functions_outlive_their_traces(monkeypatch):
    plain = tfgpipe.GPipe.train_step

    def and_collect(self, data):
        logs = plain(self, data)
        gc.collect()
        return logs

    monkeypatch.setattr(tfgpipe.GPipe, "train_step", and_collect)
    model = tfgpipe.GPipe([kl.Dense(4), Branch(), kl.Dense(4)], 3, 2)
    model.compile("sgd", "mse")
    assert np.isfinite(model.train_on_batch(ones(4, 4), ones(4, 4)))


# -------------------------------------------------------------- stateful ops
class Printing(kl.Layer):
    def call(self, x):
        tf.print("", output_stream="file:///dev/null")
        return x


class Callback(kl.Layer):
    def call(self, x):
        y = tf.numpy_function(lambda a: a, [x], x.dtype, stateful=True)
        y.set_shape(x.shape)
        return tf.stop_gradient(y) + x


def drawn():
    return tf.random.uniform([])


NOISE = {
    "direct": lambda x: x + drawn(),
    "cond": lambda x: x + tf.cond(x[0, 0] > 0, drawn, lambda: 1.0),
    "while": lambda x: tf.while_loop(
        lambda x: x[0, 0] < 3, lambda x: [x + drawn() + 1], [x]
    )[0],
    "case": lambda x: (
        x + tf.switch_case(tf.cast(x[0, 0], tf.int32), [lambda: 1.0, drawn])
    ),
    "map": lambda x: tf.map_fn(lambda row: row + drawn(), x),
}
NOISE["function"] = tf.function(NOISE["cond"], autograph=False)


class Random(kl.Layer):
    """Draws: also in a branch, a loop, a function, or over rows."""

    def __init__(self, kind="direct", **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, x):
        return NOISE[self.kind](x)


class PrintingAtTimes(kl.Layer):
    def call(self, x):
        def loud():
            with tf.control_dependencies(
                [tf.print("", output_stream="file:///dev/null")]
            ):
                return tf.identity(x)

        return tf.cond(x[0, 0] > 0, loud, lambda: x)


@pytest.mark.filterwarnings("ignore:.*by a scalar that follows from rows")
@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (Printing, "PrintV2"),
        (Callback, "PyFunc"),
        (PrintingAtTimes, "PrintV2"),
    ],
)
def test_stateful_operation_warns_and_leaves_devices_concurrent(layer, kind):
    layers = [kl.Dense(4), layer(name="loud"), kl.Dense(4), layer(name="too")]
    layers.append(kl.Dense(4))
    with pytest.warns(UserWarning, match="side effects") as caught:
        graph = graph_of(
            layers, 3, 4, ones(8, 4), ones(8, 4), layers_per_cell=[2, 2, 1]
        )
    messages = [str(warning.message) for warning in caught]
    for k, name in enumerate(("loud", "too")):
        start = f"Layer '{name}' of cell {k} runs {kind}"
        assert [m.startswith(start) for m in messages].count(True) == 1
    for op in tasks(graph):
        assert all(c.device == op.device for c in op.control_inputs)


class Checking(kl.Layer):
    """Fails where a number is negative or not finite."""

    def call(self, x):
        zero = tf.zeros([], x.dtype)
        with tf.control_dependencies([tf.debugging.assert_less(zero, x + 9)]):
            x = tf.identity(x)
        return tf.debugging.check_numerics(x, "not finite")


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 2)])
def test_checks_of_values_are_no_side_effects(k, m):
    """Warnings are errors here; nor has one task of all any."""
    layers = [kl.Dense(4), Checking(name="checking"), kl.Dense(4)]
    model = tfgpipe.GPipe([*layers, *[Printing()] * (m == 1)], k, m)
    model.compile("sgd", "mse")
    model.train_on_batch(ones(4, 4), ones(4, 4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="'checking'"):
        model.train_on_batch(np.nan * ones(4, 4), ones(4, 4))


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("remat", ["always", "except_last"])
def test_random_operation_under_remat_is_refused(kind, remat):
    layers = [(kl.Dense(4), 1.0), (Random(kind, name="noise"), 1.0)]
    model = tfgpipe.GPipe(layers, 2, 2, remat=remat)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"'noise' of cell 1.*RandomUniform"):
        model.train_on_batch(ones(4, 4), ones(4, 4))


def test_random_operation_without_remat_warns_and_trains():
    model = tfgpipe.GPipe([kl.Dense(4), Random()], 2, 2, remat="never")
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="RandomUniform"):
        loss = model.train_on_batch(ones(4, 4), ones(4, 4))
    assert np.isfinite(loss)


# -------------------------------------------------------------------- errors
class Failing(kl.Layer):
    def call(self, x, training=False):
        if training and getattr(self, "armed", False):
            raise RuntimeError("out of luck")
        return x


def test_failure_in_a_cell_names_layer_cell_and_device():
    failing = Failing(name="unlucky")
    model = tfgpipe.GPipe([kl.Dense(4), failing], 2, 2)
    model.compile("sgd", "mse")
    model.build((None, 4))
    failing.armed = True
    with pytest.raises(RuntimeError, match="out of luck") as error:
        model.train_on_batch(ones(4, 4), ones(4, 4))
    notes = "".join(getattr(error.value, "__notes__", ["'unlucky' of cell 1"]))
    assert "'unlucky' of cell 1" in notes
