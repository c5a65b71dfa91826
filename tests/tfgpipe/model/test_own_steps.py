"""Gradients for training steps of one's own are those of a tape."""

import re
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from test_docs import blocks
from tiny import assert_close, assert_same, data, layers, pipeline

import tfgpipe

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


class Plain(keras.Model):
    """Layers in plain Keras, with the same method by a tape."""

    def __init__(self, layers, *args, **kwargs):
        super().__init__()
        self.body = keras.Sequential(layers)

    layers = property(lambda self: self.body.layers)
    input_shape = property(lambda self: self.body.input_shape)

    def call(self, x, training=None):
        return self.body(x, training=training)

    def loss_and_gradients(
        self, x, y=None, sample_weight=None, *, update_metrics=True
    ):
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        if update_metrics:
            self.compute_metrics(x, y, y_pred, sample_weight)
        return loss, tape.gradient(loss, self.trainable_variables)


def plain_of(make=layers):
    keras.utils.set_random_seed(5)
    return Plain(make())


def compiled(model, optimizer="sgd", loss="mse", **kwargs):
    model.compile(OPTIMIZERS[optimizer](), loss, **kwargs)
    return model


def values(results):
    return [None if t is None else tf.convert_to_tensor(t) for t in results]


def assert_like_tape(model, expected, batch):
    loss, gradients = model.loss_and_gradients(*batch)
    other, others = expected.loss_and_gradients(*batch)
    assert_close(loss.numpy(), other.numpy())
    assert len(gradients) == len(others) == len(model.trainable_variables)
    for ours, theirs in zip(values(gradients), values(others)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours.numpy(), theirs.numpy())


# ------------------------------------------------------------------ recipes
def recipe(name, cls):
    """A class of the page, which is a subclass of `cls`."""
    (source,) = (
        block
        for language, _, block in blocks("docs/own_steps.md")
        if language == "python" and f"class {name}(" in block
    )
    source = re.match(r"(class .*?)\n\n\n\w", source, re.DOTALL)[1]
    known = {"keras": keras, "np": np, "tf": tf, "kl": kl}
    known["tfgpipe"] = types.SimpleNamespace(GPipe=cls)
    exec(source, known)
    keras.utils.set_random_seed(5)
    return known[name]


def fitted(model, optimizer, loss, *args):
    compiled(model, optimizer, loss, metrics=["mae"])
    fit = model.fit(*args, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return fit.history, [w.numpy() for w in model.weights]


@pytest.mark.parametrize(
    ("k", "m", "optimizer"), [(1, 1, "adam"), (2, 3, "sgd"), (3, 4, "adam")]
)
def test_sam_of_the_page_is_that_of_keras(float64, optimizer, k, m):
    found, expected = (
        fitted(recipe("SAM", cls)(layers(), k, m), optimizer, "mse", *data())
        for cls in (tfgpipe.GPipe, Plain)
    )
    assert_close(found, expected)


@pytest.mark.parametrize(("m", "optimizer"), [(1, "sgd"), (3, "adam")])
def test_gan_of_the_page_is_that_of_keras(float64, optimizer, m):
    def trained(cls):
        make = recipe("GAN", cls)
        generator = [keras.Input((3,)), kl.Dense(5, "tanh"), kl.Dense(4)]
        critic = [kl.Dense(5, "tanh"), kl.Dense(1)]
        model = make(generator, critic, (4,), num_micro_batches=m)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        compiled(model.critic, optimizer, loss)
        history, _ = fitted(model, optimizer, loss, data()[0])
        return history, [v.numpy() for v in model.trainable_variables]

    assert_close(trained(tfgpipe.GPipe), trained(Plain))


@pytest.mark.parametrize(
    ("k", "m", "optimizer"), [(1, 1, "sgd"), (3, 3, "adam")]
)
def test_two_optimizers_of_the_page_are_those_of_keras(
    float64, optimizer, k, m
):
    def trained(cls):
        head = keras.optimizers.RMSprop(0.02)
        model = recipe("TwoOptimizers", cls)(
            layers(), head, num_partitions=k, num_micro_batches=m
        )
        result = fitted(model, optimizer, "mse", *data())
        return result, [v.numpy() for v in head.variables]

    assert_close(trained(tfgpipe.GPipe), trained(Plain))


# ---------------------------------------------------------------- gradients
FEATURES = {
    "gpipe": {"k": 2},
    "one cell": {"k": 1, "m": 1},
    "1f1b": {"schedule": "1f1b"},
    "zero_bubble": {"schedule": "zero_bubble"},
    "interleaved": {"k": 4, "devices": ["CPU:0", "CPU:1"]},
    "dualpipe_v": {"k": 4, "schedule": "dualpipe_v"},
    "host": {"weights_on": "host"},
    "head_parts": {"head_parts": 2},
    "offload": {"remat": "offload"},
    "skip_nonfinite": {"skip_nonfinite": True},
}
FEATURES["interleaved"]["schedule"] = "interleaved"


def deep():
    return [*layers(), kl.Dense(3, "tanh"), kl.Dense(2)]


@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_are_those_of_a_tape(float64, feature):
    model = compiled(pipeline(deep, **{"m": 4, **FEATURES[feature]}))
    weight = np.random.default_rng(1).uniform(size=14)
    assert_like_tape(model, compiled(plain_of(deep)), (*data(), weight))


def test_replicas_have_the_gradients_of_one(float64):
    with tfgpipe.PipelineStrategy(2, 2).scope():
        model = compiled(pipeline(k=None, m=2))
    assert_like_tape(model, compiled(plain_of()), data())


def test_gradients_of_lookups_are_slices_and_those_without_are_none(float64):
    class Unused(kl.Layer):
        def build(self, shape):
            self.unused = self.add_weight(shape=(2,), name="unused")

        def call(self, x):
            return x

    def make():
        return [
            keras.Input((3,), dtype="int32"),
            kl.Embedding(9, 4),
            kl.Flatten(),
            Unused(),
            kl.Dense(2),
        ]

    batch = np.random.default_rng(0).integers(9, size=(8, 3)), data(8)[1]
    model, expected = compiled(pipeline(make)), compiled(plain_of(make))
    _, gradients = model.loss_and_gradients(*batch)
    assert isinstance(gradients[0], tf.IndexedSlices)
    assert gradients[1] is None
    assert_like_tape(model, expected, batch)


def test_gradients_are_where_the_variables_are_and_frozen_ones_have_none():
    make = layers()
    make[2].trainable = False
    model = compiled(tfgpipe.GPipe(make, 3, 2))
    _, gradients = model.loss_and_gradients(*data())
    variables = model.trainable_variables
    assert len(gradients) == len(variables) == 4
    assert [g.backing_device for g in gradients] == [
        v.value.device for v in variables
    ]

    @tf.function
    def in_graph(x, y):
        _, gradients = model.loss_and_gradients(x, y)
        places = [tf.DeviceSpec.from_string(g.device) for g in gradients]
        assert [p.device_index for p in places] == [0, 0, 2, 2]
        return gradients

    for a, b in zip(in_graph(*data()), gradients):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_second_call_in_a_function_reads_weights_anew_and_runs_after(float64):
    model = compiled(pipeline(k=2, m=2))
    expected = compiled(plain_of())

    @tf.function
    def twice(x, y):
        first = model.loss_and_gradients(x, y)
        for variable in model.trainable_variables:
            variable.assign_add(0.1 * tf.ones_like(variable))
        second = model.loss_and_gradients(x, y)
        for variable in model.trainable_variables:
            variable.assign(0.0 * variable)
        return first, second

    found = twice(*data())
    for results in found:
        loss, gradients = expected.loss_and_gradients(*data())
        assert_close(results[0].numpy(), loss.numpy())
        for a, b in zip(results[1], gradients):
            assert_close(a.numpy(), b.numpy())
        for variable in expected.trainable_variables:
            variable.assign_add(0.1 * tf.ones_like(variable))
    assert not np.any(model.trainable_variables[0].numpy())


def test_state_and_metrics_are_those_of_a_step(float64):
    def make():
        return [
            keras.Input((4,)),
            kl.Dense(6),
            kl.BatchNormalization(),
            kl.Dropout(0.3, seed=1),
            kl.Dense(2),
        ]

    model = compiled(pipeline(make, 2, 1), metrics=["mae"])
    expected = compiled(plain_of(make), metrics=["mae"])
    for _ in range(2):
        assert_like_tape(model, expected, data())
    assert_close(
        [v.numpy() for v in model.non_trainable_variables],
        [v.numpy() for v in expected.non_trainable_variables],
    )
    found, wanted = model.get_metrics_result(), expected.get_metrics_result()
    assert_close(found, wanted)  # "loss" is 0 in both
    assert found["mae"] > 0
    model.loss_and_gradients(data()[0], 9 + data()[1], update_metrics=False)
    assert model.get_metrics_result() == found


def test_overridden_compute_metrics_is_called_unless_it_shall_not():
    class Twofold(tfgpipe.GPipe):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return super().compute_metrics(x, 2 * y, 2 * y_pred, sample_weight)

    found, expected = (
        compiled(pipeline(cls=cls), metrics=["mae"])
        for cls in (Twofold, tfgpipe.GPipe)
    )
    found.loss_and_gradients(*data(), update_metrics=False)
    assert found.get_metrics_result()["mae"] == 0
    for model in (found, expected):
        model.loss_and_gradients(*data())
    twofold, once = (m.get_metrics_result()["mae"] for m in (found, expected))
    np.testing.assert_allclose(twofold, 2 * once, rtol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "factor"])
def test_gradients_are_not_scaled_where_the_optimizer_scales(float64, kind):
    optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=3.0)
    if kind == "dynamic":
        optimizer = keras.optimizers.LossScaleOptimizer(OPTIMIZERS["sgd"]())
    model = pipeline()
    model.compile(optimizer, "mse")
    assert_like_tape(model, compiled(plain_of()), data())


def test_small_gradients_of_float16_are_there():
    make = lambda: [keras.Input((4,)), kl.Dense(4), kl.Dense(2)]  # noqa: E731
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(pipeline(make))
    x, y = data()
    _, gradients = model.loss_and_gradients(x, y, np.full(14, 1e-9))
    assert all(np.any(g.numpy()) for g in gradients)


def test_step_that_forgets_to_scale_is_warned():
    class Step(tfgpipe.GPipe):
        scales = False

        def train_step(self, data):
            loss, gradients = self.loss_and_gradients(*data)
            if self.scales:
                gradients = map(self.optimizer.scale_loss, gradients)
            self.optimizer.apply([*gradients], self.trainable_variables)
            return {"loss": loss}

    plain = compiled(pipeline())
    plain.fit(*data(), verbose=0)
    model = pipeline(cls=Step)
    sgd = OPTIMIZERS["sgd"]()
    model.compile(keras.optimizers.LossScaleOptimizer(sgd), "mse")
    with pytest.warns(UserWarning, match="must be scaled for an optimizer"):
        model.fit(*data(), verbose=0)
    model = pipeline(cls=Step)
    model.scales = True
    sgd = OPTIMIZERS["sgd"]()
    model.compile(keras.optimizers.LossScaleOptimizer(sgd), "mse")
    model.fit(*data(), verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_weight_of_the_loss_is_trained_where_all_layers_are_frozen(float64):
    class Warm(tfgpipe.GPipe):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.heat = self.add_weight(shape=(), initializer="ones")

        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            return keras.ops.mean((y_pred / self.heat - y) ** 2)

    model = compiled(pipeline(cls=Warm))
    for layer in model.layers:
        layer.trainable = False
    (variable,) = model.trainable_variables
    x, y = data()
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=y, y_pred=model(x))
    expected = tape.gradient(loss, variable)
    _, (gradient,) = model.loss_and_gradients(x, y)
    assert_close(gradient.numpy(), expected.numpy())
    model.train_on_batch(x, y)
    assert_close(variable.numpy(), 1.0 - 0.05 * expected.numpy())


def test_loop_of_a_step_reads_weights_in_each_turn(float64):
    class Loop(tfgpipe.GPipe):
        def train_step(self, data):
            def turn(i, total):
                loss, gradients = self.loss_and_gradients(*data)
                for variable, gradient in zip(self.weights, gradients):
                    variable.assign_sub(0.05 * gradient)
                return i + 1, total + loss

            zero = tf.constant(0.0, tf.float64)
            _, total = tf.while_loop(lambda i, _: i < 3, turn, (0, zero))
            return {"total": total}

    model, expected = compiled(pipeline(cls=Loop)), pipeline()
    expected.compile(keras.optimizers.SGD(0.05), "mse")
    model.train_on_batch(*data())
    for _ in range(3):
        expected.train_on_batch(*data())
    assert_close(model.get_weights(), expected.get_weights())


# ------------------------------------------------------------ a step's update
class Step(tfgpipe.GPipe):
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients = self.loss_and_gradients(x, y, weight)
        for variable, gradient in zip(self.trainable_variables, gradients):
            variable.assign_add(0.0 * gradient)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def test_update_of_a_step_runs_where_the_variables_are():
    model = compiled(pipeline(cls=Step), "adam")
    graphs = []

    @tf.function
    def step(x, y):
        graphs.append(tf.compat.v1.get_default_graph())
        return model.train_step((x, y))

    step(*data())
    names = {v.path: v.value.device for v in model.trainable_variables}
    slots = model.optimizer.variables[2:]
    assert {v.value.device for v in slots} == set(names.values())
    free = [
        op.name
        for op in graphs[0].get_operations()
        if op.type in ("Mul", "AssignAddVariableOp") and not op.device
    ]
    assert not free


def test_step_without_a_finite_mini_batch_changes_nothing(float64):
    x, y = data(12)
    x[5] = np.nan
    found, expected = (
        compiled(pipeline(cls=Step, skip_nonfinite=skips), "adam")
        for skips in (True, False)
    )
    history = found.fit(x, y, 4, verbose=0, shuffle=False).history
    good = np.r_[0:4, 8:12]
    expected.fit(x[good], y[good], 4, verbose=0, shuffle=False)
    assert history["skipped_steps"] == [1.0]
    assert found.num_skipped == 1
    assert_same(found.get_weights(), expected.get_weights())
    assert_same(
        [v.numpy() for v in found.optimizer.variables],
        [v.numpy() for v in expected.optimizer.variables],
    )


def test_call_beside_a_step_leaves_state_as_it_was_if_it_is_not_finite():
    model = compiled(pipeline(skip_nonfinite=True), metrics=["mae"])
    x, y = data()
    _, gradients = model.loss_and_gradients(np.nan * x, y)
    assert not np.any(np.isfinite(gradients[0]))
    assert model.num_skipped == 1
    assert model.get_metrics_result()["mae"] == 0


def test_step_that_skips_must_be_one_graph():
    model = compiled(pipeline(cls=Step, skip_nonfinite=True))
    with pytest.raises(ValueError, match="in a branch, a loop or eagerly"):
        model.train_step(data())
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="must be left out with run_eagerly"):
        model.fit(*data(), verbose=0)


def test_step_that_runs_eagerly_is_the_same(float64):
    found, expected = (
        compiled(pipeline(cls=Step), run_eagerly=eagerly)
        for eagerly in (True, False)
    )
    for model in (found, expected):
        model.fit(*data(), verbose=0, shuffle=False)
    assert_close(found.get_weights(), expected.get_weights())


# -------------------------------------------------------------------- tapes
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_tape_around_it_is_an_error(wrap):
    model = compiled(pipeline())

    def penalty():
        with tf.GradientTape() as tape:
            _, gradients = model.loss_and_gradients(*data())
            norm = tf.add_n([tf.reduce_sum(g**2) for g in gradients])
            norm += tf.reduce_sum(model.trainable_variables[0] ** 2)
        return tape.gradient(norm, model.trainable_variables)

    with pytest.raises(ValueError, match="must not be differentiated by a"):
        wrap(penalty)()


def test_tape_around_a_step_that_it_does_not_ask_does_no_harm():
    model = compiled(pipeline())
    with tf.GradientTape():
        loss, _ = model.loss_and_gradients(*data())
        model.train_on_batch(*data())
    assert np.isfinite(loss)


def test_training_without_the_pipeline_is_warned_of_once():
    inner = pipeline()
    x = keras.Input((4,))
    model = keras.Model(x, kl.Dense(2)(inner(x)))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="pipelined.*`loss_and_grad"):
        model.fit(*data(), verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(*data(), verbose=0)
        alone = pipeline(m=1)
        with tf.GradientTape():
            alone(data()[0], training=True)
        with tf.GradientTape():
            pipeline()(data()[0])
