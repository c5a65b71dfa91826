"""What fails at run time on one device reaches the user as itself."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from tiny import compiled

import tfgpipe
from tfgpipe import failures
from tfgpipe.graphs import functions, in_turn, one_step

TIMES = 3  # which device tells first is chance
X, Y = np.ones((6, 3), "int32"), np.ones((6, 2), "float32")
BAD = X.copy()
BAD[3, 1] = 7
CALLS = {
    "fit": lambda model: model.fit(BAD, Y, batch_size=6, verbose=0),
    "evaluate": lambda model: model.evaluate(BAD, Y, batch_size=6, verbose=0),
    "predict": lambda model: model.predict(BAD, batch_size=6, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(BAD, Y),
}


class Shift(kl.Layer):
    """Has something to do before the layer that fails."""

    def call(self, x):
        return x + 0


class InBranch(kl.Embedding):
    """Looks up in one branch of two."""

    def call(self, ids):
        look_up = super().call
        return tf.cond(
            tf.shape(ids)[1] > 2,
            lambda: look_up(ids),
            lambda: tf.zeros([tf.shape(ids)[0], 3, 4]),
        )


class InFunction(kl.Embedding):
    """Looks up in a function, which exchanges tensors by itself."""

    @tf.function(autograph=False)
    def call(self, ids):
        return super().call(ids)


class FailsInGradient(kl.Layer):
    def call(self, x):
        @tf.custom_gradient
        def checked(x):
            def gradient(dy):
                return tf.debugging.check_numerics(dy / 0.0, "of no use")

            return tf.identity(x), gradient

        return checked(x)


class TakesTooFar(kl.Layer):
    def call(self, x):
        return tf.gather(x, [0, 2] + tf.cast(x[0, :2] * 0, "int32"), axis=1)


def embedding(cls=kl.Embedding, before=1, **kwargs):
    """A model whose middle cell looks up ids below 4."""
    middle = [cls(4, 4, name="table"), kl.Flatten()]
    shifts = [Shift() for _ in range(before)]
    ends = [*shifts, *middle, kl.Dense(8), kl.Dense(2)]
    layers = [keras.Input((3,), dtype="int32"), *ends]
    kwargs = {"layers_per_cell": [1, 2, 2], **kwargs}
    return compiled(tfgpipe.GPipe(layers, 3, 3, **kwargs), "sgd")


def notes(call, model, match):
    """Those of an error that always comes."""
    found, error = set(), tf.errors.InvalidArgumentError
    for _ in range(TIMES):
        with pytest.raises(error, match=match) as caught:
            call(model)
        found.add(tuple(getattr(caught.value, "__notes__", ["?"])))
    (found,) = found
    return found[0]


@pytest.mark.parametrize(
    ("cls", "schedule"),
    [
        (kl.Embedding, "gpipe"),
        (kl.Embedding, "1f1b"),
        (kl.Embedding, "zero_bubble"),
        (InBranch, "gpipe"),
    ],
)
def test_error_of_a_middle_cell_is_raised_and_names_the_layer(cls, schedule):
    model = embedding(cls, schedule=schedule)
    # Schedules differ in training, and all of Keras's calls explain alike.
    of_all = (cls, schedule) == (kl.Embedding, "gpipe")
    for call in CALLS.values() if of_all else [CALLS["fit"]]:
        check(call, model)


def check(call, model, devices="/device:CPU:1"):
    note = notes(call, model, r"= 7 is not in \[0, 4")
    assert note in ("?", f"In layer 'table' of cell 1 on {devices}.")


def test_error_names_the_cell_and_not_its_group():
    """With `remat_groups`, a cell is several inside."""
    model = embedding(before=2, layers_per_cell=[2, 2, 2], remat_groups=2)
    check(CALLS["fit"], model)


# The trial says that it could not try the gradients; then the step fails.
@pytest.mark.filterwarnings("ignore:Layer 'fails_in_gradient' was not tried")
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("gpipe", "always"), ("1f1b", "never"), ("zero_bubble", "never")],
)
def test_error_of_the_backward_pass_is_raised(schedule, remat):
    layers = [keras.Input((3,)), kl.Dense(3), kl.Dense(3), FailsInGradient()]
    layers += [kl.Dense(2)]
    cut = {"layers_per_cell": [1, 2, 1], "schedule": schedule, "remat": remat}
    model = compiled(tfgpipe.GPipe(layers, 3, 3, **cut), "sgd")
    model.evaluate(X, Y, verbose=0)
    note = notes(CALLS["fit"], model, "of no use")
    name = layers[3].name
    assert note in ("?", f"In layer '{name}' of cell 1 on /device:CPU:1.")


def test_error_of_a_replica_is_raised():
    with tfgpipe.PipelineStrategy(2, 2).scope():
        layers = [Shift(), kl.Embedding(4, 4, name="table"), kl.Flatten()]
        layers += [kl.BatchNormalization(), kl.Dense(2)]
        layers = [keras.Input((3,), dtype="int32"), *layers]
        model = tfgpipe.GPipe(layers, None, 1, layers_per_cell=[1, 4])
    compiled(model, "sgd")
    for call in CALLS.values():
        check(call, model, "/device:CPU:1 or /device:CPU:3")


def test_equal_cells_are_all_named():
    """They run operations of the same names."""
    layers = [TakesTooFar(name="a"), TakesTooFar(name="b")]
    layers = [keras.Input((2,)), kl.Dense(2), *layers, kl.Dense(2)]
    model = compiled(tfgpipe.GPipe(layers, 4, 2), "sgd")
    match = r"= 2 is not in \[0, 2"
    with pytest.raises(tf.errors.InvalidArgumentError, match=match) as caught:
        model.train_on_batch(Y, Y)
    expected = (
        "In layer 'a' of cell 1 on /device:CPU:1, "
        "or its equal layer 'b' of cell 2 on /device:CPU:2."
    )
    assert getattr(caught.value, "__notes__", [expected])[0] == expected


@pytest.mark.parametrize(
    ("cls", "num_steps"), [(kl.Embedding, 2), (InFunction, 1)]
)
def test_cancellation_without_a_cause_says_where_that_is(cls, num_steps):
    model = embedding(cls)
    model.compile("sgd", "mse", steps_per_execution=num_steps)
    errors = tf.errors.CancelledError, tf.errors.InvalidArgumentError
    with pytest.raises(errors, match=r"run_eagerly=True|= 7 is not in"):
        model.fit(BAD, Y, batch_size=3, verbose=0)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="= 7 is not in"):
        model.fit(BAD, Y, batch_size=3, verbose=0)


def shares(dtype="float32", device=None):
    """Whether a function traced now exchanges tensors where its caller does."""
    specs = [tf.TensorSpec([], dtype)]
    with tf.Graph().as_default() as graph, tf.device(device):
        tf.constant(1)
    definition, options = graph.as_graph_def(), {"autograph": False}
    traced = functions.traced(lambda _: 1, specs, options, definition)
    return traced.function_def.attr["shared_rendezvous"].b


def run(step, is_alone=True):
    """Traces what Keras would call with a mini-batch."""
    traced = tf.function(step, autograph=False)
    around = functools.partial(in_turn, is_alone)
    failures.explained(traced.get_concrete_function, list, around)()


def shared(*steps, is_alone=True):
    """Of steps that are run one after the other."""
    found = []
    steps = [one_step(lambda one=one: found.append(one())) for one in steps]
    run(lambda: [step() for step in steps], is_alone)
    return found


def test_only_functions_that_wait_for_each_other_share():
    """Others, run at the same time on one device, would mix their tensors."""

    def counting():
        with in_turn(False):
            return shares()

    assert shared(shares) == [True]
    assert shared(shares, shares) == [True, False]
    assert shared(shares, is_alone=False) == [False]
    assert shared(counting) == [False]
    assert not shares()  # the user's own function around a step

    def loop():
        step = one_step(lambda i: (found.append(shares()), i + 1)[1])
        return tf.while_loop(lambda i: i < 2, step, [0])

    found = []
    run(loop)
    assert set(found) == {False}


def test_functions_that_may_leave_their_device_do_not_share():
    """On another host, they would wait for ever."""
    pinned = functools.partial(shares, device="CPU:0")
    table = functools.partial(shares, dtype=tf.resource)
    assert shared(pinned) == [False]
    assert shared(table) == [False]
