"""What subclasses hold and make of the data trains as in plain Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from keras import ops

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")

X = np.random.default_rng(0).standard_normal((20, 6))
Y = np.arange(20) % 5
POINTS = [(2, 1), (2, 4), (1, 4)]


def layers():
    return [
        keras.Input((6,), name="features"),
        kl.Dense(8, "relu", name="hidden"),
        kl.Dense(5, name="classes"),
    ]


def of_graph():
    first, *others = layers()
    x = first
    for layer in others:
        x = layer(x)
    return keras.Model(first, x)


class Distiller:
    """Learns from a teacher, at a temperature that is trained, too."""

    def hold(self):
        self.a_teacher = keras.Sequential(
            [keras.Input((6,)), kl.Dense(9, "tanh"), kl.Dense(5)], name="other"
        )
        self.a_teacher.trainable = False
        self.temperature = self.add_weight(shape=(), initializer="ones")
        self.divergence = keras.metrics.Mean(name="divergence")
        self.a_first = self.get_layer("hidden")  # held twice

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        taught = self.a_teacher(x, training=False)
        soft, own = (
            ops.softmax(z / self.temperature) for z in (taught, y_pred)
        )
        apart = ops.mean(keras.losses.kl_divergence(soft, own))
        self.divergence.update_state(apart)
        hard = super().compute_loss(x, y, y_pred, sample_weight)
        return 0.3 * hard + 0.7 * apart * self.temperature**2


class Penalised:
    """A held layer adds to the loss, before it is computed."""

    def hold(self):
        self.head = kl.Dense(5, activity_regularizer="l2", name="head")
        self.head.build((None, 5))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        y_pred = self.head(y_pred)
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + sum(self.head.losses)


class OfKeras:
    def __init__(self):
        model = of_graph()
        super().__init__(model.inputs, model.outputs)
        self.hold()


class InCells:
    def __init__(self, layers, *args, **kwargs):
        super().__init__(layers, *args, **kwargs)
        self.hold()


def plain_of(kind):
    keras.utils.set_random_seed(3)
    return ready(kind, type("Plain", (OfKeras, kind, keras.Model), {})())


def cells_of(kind, make, *args):
    keras.utils.set_random_seed(3)
    cls = type("Cells", (InCells, kind, tfgpipe.GPipe), {})
    return ready(kind, cls(make(), *args))


def ready(kind, model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), getattr(kind, "loss", loss))
    return model


def fitted(model, **arguments):
    data = (X, Y) if model.loss is not None else (X,)
    return model.fit(
        *data,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=data,
        **arguments,
    ).history


def assert_alike(found, expected, rtol=1e-9):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol, err_msg=name)


def assert_same_weights(model, other, rtol=0.0):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol, rtol)


@pytest.mark.parametrize("kind", [Distiller, Penalised])
def test_subclass_that_holds_others_trains_as_in_keras(kind):
    plain = plain_of(kind)
    expected = fitted(plain)
    for k, m in POINTS[: 2 if kind is Distiller else 3]:
        model = cells_of(kind, layers, k, m)
        assert_alike(fitted(model), expected)
        assert_same_weights(model, plain, 1e-8)
        assert [layer.name for layer in model.layers] == ["hidden", "classes"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(of_graph, id="model"),
        pytest.param(lambda: layers()[1:], id="later", marks=pytest.mark.slow),
    ],
)
def test_inputs_may_be_known_later_or_a_model_have_them(make):
    expected = fitted(plain_of(Distiller))
    assert_alike(fitted(cells_of(Distiller, make, 2, 4)), expected)


def test_what_is_held_may_come_after_training():
    model = tfgpipe.GPipe(layers(), 2, 2)
    model.compile("sgd", "mse")
    model.fit(X, X[:, :5], verbose=0)
    Distiller.hold(model)
    assert len(model.weights) == 4 + 4 + 1
    assert model.get_metrics_result().keys() == {"loss", "divergence"}


def test_files_have_what_a_subclass_holds(tmp_path):
    plain = plain_of(Distiller)
    model = cells_of(Distiller, layers, 2, 2)
    fitted(model)
    model.save_weights(tmp_path / "held.weights.h5")
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "held.weights.h5")
    assert_same_weights(plain, model)
    fitted(plain)
    plain.save_weights(tmp_path / "plain.weights.h5")
    other = cells_of(Distiller, layers, 1, 1)
    other.load_weights(tmp_path / "plain.weights.h5")
    assert_same_weights(other, plain)
    assert_alike(fitted(other), fitted(plain))


@keras.saving.register_keras_serializable()
class Saved(InCells, Distiller, tfgpipe.GPipe):
    pass


@pytest.mark.slow
def test_training_that_goes_on_has_what_a_subclass_holds(tmp_path):
    def new(k):
        keras.utils.set_random_seed(3)
        model = Saved(layers(), k, 2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss)
        return model

    model = new(2)
    checkpoint = tfgpipe.callbacks.Checkpoint(tmp_path / "own")
    fitted(model, callbacks=[checkpoint])
    model.save(tmp_path / "model.keras")
    of_tensorflow = tf.train.Checkpoint(
        model=model, optimizer=model.optimizer
    ).save(tmp_path / "tensorflow")
    loaded = tfgpipe.load_model(tmp_path / "model.keras", num_partitions=1)
    restored, read = new(1), new(1)
    tfgpipe.restore(restored, tmp_path / "own")
    read.build_optimizer()
    tf.train.Checkpoint(model=read, optimizer=read.optimizer).restore(
        of_tensorflow
    ).assert_consumed()
    others = loaded, restored, read
    for other in others:
        assert_same_weights(other, model)
    expected = fitted(model)
    for other in others:
        assert_alike(fitted(other), expected, rtol=0)


@keras.saving.register_keras_serializable()
class Noisy(tfgpipe.GPipe):
    """Draws noise by a seed of its own, beside that of its list's dropout."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seeds = keras.random.SeedGenerator(3)
        self.dropout = kl.Dropout(0.5, seed=4)

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        noise = keras.random.normal(ops.shape(x), seed=self.seeds)
        return super().train_step((x + noise, self.dropout(x, training=True)))


def test_seeds_that_are_held_go_on_after_loading(tmp_path):
    seeded = [keras.Input((6,)), kl.Dense(8), kl.Dropout(0.5), kl.Dense(6)]
    model = Noisy(seeded, 2, 2)
    model.compile("sgd", "mse")
    fit = {"batch_size": 10, "shuffle": False, "verbose": 0}
    model.fit(X, **fit)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = tfgpipe.load_model(tmp_path / "model.keras", num_partitions=1)
    read = tfgpipe.load_model(tmp_path / "model.keras")
    read.fit(X, **fit)
    read.load_weights(tmp_path / "model.weights.h5")
    model.fit(X, **fit)
    for other in (loaded, read):
        other.fit(X, **fit)
        assert_alike(other.history.history, model.history.history, rtol=0)
        assert len(model.variables) == len(model.weights) + 3
        for a, b in zip(model.variables, other.variables, strict=True):
            np.testing.assert_array_equal(a, b)


def test_weights_that_are_held_are_created_in_deferred():
    with tfgpipe.deferred():
        model = cells_of(Distiller, layers, 2, 4)
    assert_alike(fitted(model), fitted(plain_of(Distiller)))


# ------------------------------------------------------------- fit without y
class Autoencoder:
    """The targets are made by a step."""

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return super().train_step((0.5 * x, x))

    def test_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return super().test_step((0.5 * x, x))


class Denoising:
    """A step makes a dict of one tensor, with more rows, and targets."""

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        x = ops.concatenate([x, -x])
        noise = ops.flip(x, 1)
        times = ops.ones_like(x[:, :1])
        return super().train_step(({"noisy": x + noise, "time": times}, noise))

    def test_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        times = ops.zeros_like(x[:, :1])
        return super().test_step(({"noisy": x, "time": times}, x))


class OwnLoss:
    """The targets are made by `compute_loss`."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return super().compute_loss(x, x, y_pred, sample_weight)


@keras.saving.register_keras_serializable()
class Joined(kl.Layer):
    def call(self, inputs):
        return ops.concatenate([inputs["noisy"], inputs["time"]], -1)


def autoencoder(kind, is_declared):
    dense = [kl.Dense(4, "relu", name="code"), kl.Dense(6, name="decoded")]
    if kind is Denoising:
        return [Joined(), *dense]
    return [keras.Input((6,)), *dense] if is_declared else dense


@pytest.mark.parametrize(
    ("kind", "is_declared"),
    [
        (Autoencoder, True),
        (Denoising, False),
        pytest.param(Autoencoder, False, marks=pytest.mark.slow),
        pytest.param(OwnLoss, True, marks=pytest.mark.slow),
        pytest.param(OwnLoss, False, marks=pytest.mark.slow),
    ],
)
def test_fit_without_labels_trains_as_in_keras(kind, is_declared):
    def run(base, *args):
        keras.utils.set_random_seed(3)
        cls = type("Own", (kind, base), {})
        model = cls(autoencoder(kind, is_declared), *args)
        model.compile(keras.optimizers.Adam(0.05), getattr(kind, "loss", "mse"))
        history = model.fit(
            X,
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(X,),
        ).history
        return history, model

    expected, plain = run(keras.Sequential)
    for k, m in [(2, 1), (2, 4)]:
        found, model = run(tfgpipe.GPipe, k, m)
        assert_alike(found, expected)
        assert_same_weights(model, plain, 1e-8)
