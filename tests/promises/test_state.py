"""Batch normalisation, dropout and other state over micro-batches."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


def trained(made, k, m, x=None, y=None, **arguments):
    """Variables after two epochs of SGD with momentum; Keras's if K is 0."""
    keras.utils.set_random_seed(5)
    keras.random.normal(())  # makes the generator that Keras has for all
    if x is None:
        rng = np.random.default_rng(3)
        x, y = rng.random((8, 5)), rng.random((8, 2))
    layers = [keras.Input(x.shape[1:]), *made()]
    model = keras.Sequential(layers)
    if k:
        model = tfgpipe.GPipe(layers, k, m, **arguments)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [v.numpy() for v in model.variables]


# -------------------------------------------------------- batch normalisation
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


def micro_batches(x, m):
    m = min(m, len(x))
    bounds = [len(x) * i // m for i in range(m + 1)]
    return [x[a:b] for a, b in itertools.pairwise(bounds)]


def reference_step(layers, x, y, m, learning_rate):
    """One step of the paper's rule, by plain Keras layers, one by one.

    Each micro-batch is normalised by its own moments, the moving statistics see
    the moments of all rows.
    """
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
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(19, 4, 4, 2)), rng.normal(size=(19, 2))
    layers = normalized()
    keras.Sequential(layers).build((None, 4, 4, 2))
    for start in (0, 8, 16):  # the last batch has 3 rows
        batch = slice(start, start + 8)
        reference_step(layers, x[batch], y[batch], m, 0.1)
    model = tfgpipe.GPipe(normalized(), k, m, remat=remat)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for expected, layer in zip(layers, model.sequence):
        for a, b in zip(expected.variables, layer.variables):
            np.testing.assert_allclose(b.numpy(), a.numpy(), 1e-10, 1e-13)


# ---------------------------------------------------- what Keras does not know
class Boxed(kl.Layer):
    """Keeps what Keras does not track."""

    def __init__(self, kept=None, **kwargs):
        super().__init__(**kwargs)
        self.box = lambda: kept


class Untracked(Boxed):
    """Assigns a variable."""

    def __init__(self):
        super().__init__(keras.Variable(0.0, dtype="float64"))

    def call(self, x):
        self.box().assign_add(1.0)
        return x + self.box()


class Unseeded(Boxed):
    """Draws from the seed generator that Keras has for all."""

    def call(self, x):
        shape = keras.ops.shape(x)
        return x + keras.random.normal(shape, dtype="float64", seed=self.box())


class Hidden(Unseeded):
    """Draws from a generator that Keras does not know."""

    def __init__(self):
        super().__init__(keras.random.SeedGenerator(3))


@pytest.mark.parametrize("layer", [Untracked, Unseeded, Hidden])
def test_assignment_to_an_untracked_variable_is_that_of_keras(layer):
    rng = np.random.default_rng(1)
    x, y, boxed = rng.normal(size=(19, 5)), rng.normal(size=(19, 2)), []

    def made():
        boxed.append(layer())
        return [kl.Dense(4), boxed[-1], kl.Dense(2)]

    points = [(1, 1), (2, 1)] + [(2, 2)] * (layer is Untracked)
    plain = trained(made, 0, 1, x, y)
    for k, m in points:
        for a, b in zip(trained(made, k, m, x, y), plain, strict=True):
            np.testing.assert_allclose(a, b, 1e-10, 1e-12)
    if layer is Untracked:
        assert [float(own.box()) for own in boxed] == [6.0] * 4
    if layer is Hidden:
        assert {int(own.box().state.value[1]) for own in boxed} == {6}


class Unordered(kl.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        self.seed_generator.next(ordered=False)
        shape = keras.ops.shape(x)
        return x * keras.random.uniform(shape, seed=self.seed_generator)


class Metered(kl.Layer):
    """Multiplies by its metric."""

    def __init__(self):
        super().__init__()
        self.metric = keras.metrics.Mean()

    def call(self, x):
        self.metric.update_state(x)
        return x * self.metric.result()


def metered():
    layer = Metered()
    return [kl.Dense(3), layer, kl.Dense(3), layer, kl.Dense(2)]


@pytest.mark.filterwarnings("ignore:Layer 'metered:UserWarning")
@pytest.mark.parametrize(
    ("made", "k", "words"),
    [
        # Micro-batches would draw the same.
        (lambda: [Unseeded()], 1, r"`seed_generator.next\(\)` alone"),
        # No count of draws.
        (lambda: [Unordered()], 1, r"`seed_generator.next\(\)` alone"),
        (metered, 5, r"in one cell, and not in \[1, 3\]"),
    ],
)
def test_state_of_several_micro_batches_is_refused(made, k, words):
    with pytest.raises(ValueError, match=words):
        trained(lambda: [*made(), kl.Dense(2)], k, 2)


@pytest.mark.filterwarnings("ignore:Layer 'metered:UserWarning")
def test_metric_of_two_cells_is_that_of_keras():
    expected = trained(metered, 0, 1)
    for a, b in zip(expected, trained(metered, 5, 1), strict=True):
        np.testing.assert_allclose(b, a, 1e-12, 1e-14)


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

    def layers():
        return [kl.Dense(3), made(), kl.Dense(2)]

    expected = trained(layers, 0, 1)
    for m in (1, 2):
        for a, b in zip(expected, trained(layers, 2, m), strict=True):
            assert a.dtype == b.dtype == np.float32
            np.testing.assert_allclose(b, a, 2e-2, 2e-2)
            if not a.shape:
                assert a == b
