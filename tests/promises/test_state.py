"""Batch normalisation, dropout and other state over micro-batches."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


def run(layers, x, y, k, m, optimizer=None, epochs=2, **kwargs):
    model = tfgpipe.GPipe(layers, k, m, **kwargs)
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model


# -------------------------------------------------------- batch normalisation
class MovedByItself(kl.BatchNormalization):
    """Has moments of its own."""

    def call(self, x, training=False):
        mean = keras.ops.mean(x, axis=0)
        if training:
            self.moving_mean.assign(0.9 * self.moving_mean + 0.1 * mean)
        return x - mean


def test_batch_norm_whose_moments_are_its_own_is_refused():
    x = np.ones((8, 2))
    with pytest.raises(ValueError, match=r"leave its moments.*'own'"):
        run([kl.Dense(2), MovedByItself(name="own")], x, x, 1, 2)


def normalized(momentum=0.9):
    keras.utils.set_random_seed(2)
    return [
        kl.Conv2D(3, 3, padding="same"),
        kl.BatchNormalization(momentum=momentum),
        kl.ReLU(),
        kl.Conv2D(4, 2),
        kl.BatchNormalization(momentum=momentum, axis=1),
        kl.GlobalAveragePooling2D(),
        kl.Dense(5),
        kl.Dense(2),
    ]


def images(rows):
    rng = np.random.default_rng(1)
    return rng.standard_normal((rows, 4, 4, 2)), rng.standard_normal((rows, 2))


def micro_batches(x, m):
    m = min(m, len(x))
    bounds = [len(x) * i // m for i in range(m + 1)]
    return [x[a:b] for a, b in itertools.pairwise(bounds)]


def reference_step(layers, x, y, m, learning_rate):
    """One step of the paper's rule, by plain Keras layers, one after the
    other: each micro-batch is normalised by its own moments, the moving
    statistics see the moments of all rows."""
    norms = [la for la in layers if isinstance(la, kl.BatchNormalization)]
    old = [(n.moving_mean.numpy(), n.moving_variance.numpy()) for n in norms]
    weights = [w for la in layers for w in la.trainable_variables]
    seen = {id(n): [] for n in norms}
    total = [0.0] * len(weights)
    for x_m, y_m in zip(micro_batches(x, m), micro_batches(y, m)):
        with tf.GradientTape() as tape:
            h = tf.constant(x_m)
            for layer in layers:
                if id(layer) in seen:
                    seen[id(layer)].append(h.numpy())
                h = layer(h, training=True)
            loss = tf.reduce_mean((h - y_m) ** 2) * len(x_m) / len(x)
        gradients = tape.gradient(loss, [w.value for w in weights])
        total = [t + g.numpy() for t, g in zip(total, gradients)]
    for weight, gradient in zip(weights, total):
        weight.assign(weight - learning_rate * gradient)
    for norm, (mean, variance) in zip(norms, old):
        rows = np.concatenate(seen[id(norm)])
        axes = tuple(i for i in range(4) if i != norm.axis % 4)
        a = norm.momentum
        norm.moving_mean.assign(mean * a + rows.mean(axes) * (1 - a))
        norm.moving_variance.assign(variance * a + rows.var(axes) * (1 - a))


@pytest.mark.parametrize(
    ("k", "m", "remat"),
    [(2, 3, "always"), (4, 8, "except_last")],
)
def test_batch_norm_follows_the_papers_rule(k, m, remat):
    x, y = images(19)
    layers = normalized()
    for layer in layers[:1]:
        layer.build((None, 4, 4, 2))
    keras.Sequential(layers).build((None, 4, 4, 2))
    for start in (0, 8, 16):  # the last batch has 3 rows
        batch = slice(start, start + 8)
        reference_step(layers, x[batch], y[batch], m, 0.1)
    sgd = keras.optimizers.SGD(0.1)
    model = run(normalized(), x, y, k, m, sgd, epochs=1, remat=remat)
    for expected, layer in zip(layers, model.sequence):
        for a, b in zip(expected.variables, layer.variables):
            np.testing.assert_allclose(b.numpy(), a.numpy(), 1e-10, 1e-13)


def plain_and_pipelines(made, x, y, points, **kwargs):
    """Variables after two epochs of SGD with momentum: Keras's, and others."""
    for k, m in [(0, 1), *points]:
        keras.utils.set_random_seed(5)
        keras.random.normal(())  # makes the generator that Keras has for all
        layers = [keras.Input(x.shape[1:]), *made()]
        model = tfgpipe.GPipe(layers, k, m) if k else keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **kwargs)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        yield [v.numpy() for v in model.variables]


# -------------------------------------------------------------------- dropout


def rows(count):
    rng = np.random.default_rng(1)
    return rng.standard_normal((count, 5)), rng.standard_normal((count, 2))


# ----------------------------------------------------------------- the others
class Untracked(kl.Layer):
    """Assigns a variable that Keras does not know."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        variable = keras.Variable(0.0, dtype="float64")
        self.box = lambda: variable

    def call(self, x):
        self.box().assign_add(1.0)
        return x + self.box()


class Unseeded(kl.Layer):
    """Draws from the seed generator that Keras has for all."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), dtype="float64")


class Hidden(kl.Layer):
    """Draws from a generator that Keras does not know."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        generator = keras.random.SeedGenerator(3)
        self.box = lambda: generator

    def call(self, x):
        shape = keras.ops.shape(x)
        return x + keras.random.normal(shape, seed=self.box())


@pytest.mark.parametrize("layer", [Untracked, Unseeded, Hidden])
def test_assignment_to_an_untracked_variable_is_that_of_keras(layer):
    x, y = rows(19)
    boxed = []

    def made():
        boxed.append(layer())
        return [kl.Dense(4), boxed[-1], kl.Dense(2)]

    points = (
        [(1, 1), (2, 1), (2, 2)] if layer is Untracked else [(1, 1), (2, 1)]
    )
    plain, *found = plain_and_pipelines(made, x, y, points)
    for one in found:
        for a, b in zip(one, plain, strict=True):
            np.testing.assert_allclose(a, b, 1e-10, 1e-12)
    if layer is Untracked:
        assert [float(own.box()) for own in boxed] == [6.0] * 4
    if layer is Hidden:
        assert {int(own.box().state.value[1]) for own in boxed} == {6}


def test_micro_batches_that_would_draw_the_same_are_refused():
    with pytest.raises(ValueError, match=r"without a seed\. Draw with `seed=`"):
        tfgpipe.GPipe([keras.Input((4,)), Unseeded(), kl.Dense(2)], 1, 2)


class Own(kl.Layer):
    """Keeps state of its own, by a function of it and of the inputs."""

    def __init__(self, rule, start=0.0, **kwargs):
        super().__init__(**kwargs)
        self.rule = rule
        self.start = start

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.own = self.add_weight(
            initializer=lambda shape, dtype: keras.ops.cast(self.start, dtype),
            dtype=str(np.asarray(self.start).dtype),
            trainable=False,
        )

    def call(self, x):
        return self.rule(self, x * self.w)


class Metered(Own):
    def __init__(self):
        super().__init__(None)
        self.metric = keras.metrics.Mean()

    def call(self, x):
        x = x * self.w
        self.metric.update_state(x)
        return x * self.metric.result()


@pytest.mark.filterwarnings("ignore:Layer 'metered:UserWarning")
def test_metric_of_two_cells_is_that_of_keras_or_refused():
    def made():
        metered = Metered()
        return [metered, kl.Dense(3), metered]

    expected = trained(made, 1, 1, plain=True)
    for a, b in zip(expected, trained(made, 5, 1), strict=True):
        np.testing.assert_allclose(b, a, 1e-12, 1e-14)
    with pytest.raises(
        ValueError, match=r"in one cell.*\[1, 3\] update in turn"
    ):
        trained(made, 5, 2)


def trained(made, k, m, plain=False, rows=8, epochs=2):
    """Weights after some mini-batches of SGD with momentum."""
    keras.utils.set_random_seed(5)
    layers = [kl.Dense(3), *made(), kl.Dense(2)]
    x, y = np.split(np.random.default_rng(3).random((rows, 7)), [5], axis=1)
    model = keras.Sequential(layers) if plain else tfgpipe.GPipe(layers, k, m)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return [v.numpy() for layer in layers for v in layer.variables]


class Unordered(kl.Layer):
    def __init__(self, generator, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = generator

    def call(self, x):
        self.seed_generator.next(ordered=False)
        shape = keras.ops.shape(x)
        return x * keras.random.uniform(shape, seed=self.seed_generator)


def test_seed_that_is_no_count_is_refused():
    generator = keras.random.SeedGenerator(3)
    with pytest.raises(ValueError, match=r"`seed_generator.next\(\)` alone"):
        trained(lambda: [Unordered(generator)], 1, 2)


class Whole(kl.Layer):
    """Reads its weight as it is stored, and assigns it as exactly."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 3), name="kernel")
        self.kept = self.add_weight((), "ones", trainable=False, name="kept")

    def call(self, x):
        return x @ self.kernel


class Rounds(kl.Layer):
    """Reads a weight rounded, then whole, and assigns what 16 bits have not."""

    def build(self, shape):
        self.whole = Whole(dtype="float32")
        self.whole.build(shape)

    def call(self, x):
        y = x @ self.whole.kernel * self.whole.kept
        y += keras.ops.cast(self.whole(x), y.dtype)
        self.whole.kernel.assign(
            keras.ops.full((x.shape[-1], 3), 0.123456789, "float32")
        )
        self.whole.kept.assign(keras.ops.array(1.00012345, "float32"))
        return y


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # in Keras
@pytest.mark.parametrize(
    ("policy", "made"),
    [
        ("mixed_float16", lambda: kl.SpectralNormalization(kl.Dense(3))),
        ("mixed_bfloat16", Rounds),
    ],
    ids=["normalised", "read twice"],
)
def test_state_of_layers_that_round_is_stored_whole(policy, made):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    expected = trained(lambda: [made()], 1, 1, plain=True)
    for m in (1, 2):
        found = trained(lambda: [made()], 2, m)
        for a, b in zip(expected, found, strict=True):
            assert a.dtype == b.dtype == np.float32
            np.testing.assert_allclose(b, a, 2e-2, 2e-2)
            if not a.shape:
                assert a == b
