"""Models with a `call` of their own train as in Keras, cut at any layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_call_models import MODELS, Loop, Softmax
from quick import quick

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def as_written():
    """TensorFlow's graph optimiser, which regroups sums, is off."""
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )


def trained(name, k, m=1, **arguments):
    """Losses, weights, outputs; of plain Keras for K = 0."""
    make, x, y, loss = MODELS[name]
    keras.utils.set_random_seed(3)
    own = make()
    model = own
    if k:
        model = tfgpipe.GPipe(own, k, m, **arguments)
    how = {} if k else {"jit_compile": False}
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, **how)
    history = model.fit(x, y, 6, epochs=2, shuffle=False, verbose=0).history
    outputs = model.predict(x, 6, verbose=0)
    weights = [*map(np.array, own.get_weights())]
    return history["loss"], weights, keras.tree.flatten(outputs)


# Without dropout and batch normalisation several micro-batches are Keras's.
CASES = quick([*MODELS], ["Loop", "Softmax", "TiedWords", "LeftInPython"])


# The gradients of three uses of a weight and more are added in another order.
USED_OFTEN = {"OverTime"}


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("name", CASES)
def test_model_with_a_call_of_its_own_has_the_bits_of_keras(name):
    expected = trained(name, 0)
    for k in (1, 3):
        found = trained(name, k)
        np.testing.assert_allclose(found[0], expected[0], 1e-12)
        for a, b in zip(found[1], expected[1], strict=True):
            if name in USED_OFTEN:
                np.testing.assert_allclose(a, b, 1e-12, 1e-15)
            else:
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_of_a_model_with_a_call_of_its_own_are_keras_s(name):
    expected, first = trained(name, 0), trained(name, 1, 3)
    for found, reference in zip(first, expected):
        for a, b in zip(found, reference, strict=True):
            np.testing.assert_allclose(a, b, 1e-8, 1e-10)
    for schedule, remat in (("1f1b", "always"), ("zero_bubble", "never")):
        found = trained(name, 2, 3, schedule=schedule, remat=remat)
        other = trained(name, 1, 3, schedule=schedule, remat=remat)
        for a, b in zip(found[1], other[1], strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(found[1], first[1], strict=True):
            np.testing.assert_allclose(a, b, 1e-9, 1e-11)


def test_cells_begin_inside_of_layers_too():
    model = tfgpipe.GPipe(Softmax(), 4, 1)
    model.compile("sgd", "mse")
    model.build((None, 6))
    assert [len(cell.layers) for cell in model.cells()] == [2, 1, 1, 1]


def test_file_of_a_model_with_a_call_of_its_own_goes_on_at_another_k(tmp_path):
    make, x, y, loss = MODELS["Loop"]
    model = tfgpipe.GPipe(make(), 2, 2)
    model.compile("adam", loss)
    model.fit(x, y, 6, verbose=0)
    model.save(tmp_path / "own.keras")
    other = tfgpipe.load_model(
        tmp_path / "own.keras",
        num_partitions=3,
        custom_objects={"Loop": Loop},
    )
    for one in (model, other):
        one.fit(x, y, 6, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Measured(Loop):
    """Holds a metric, which its call updates."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x, training=False):
        y = super().call(x, training)
        self.size.update_state(keras.ops.sum(y * y, -1))
        return y


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 3)])
def test_metrics_that_a_model_holds_are_in_the_logs(k, m):
    _, x, y, loss = MODELS["Loop"]
    logs = []
    for is_pipeline in (False, True):
        keras.utils.set_random_seed(3)
        own = Measured()
        model = tfgpipe.GPipe(own, k, m) if is_pipeline else own
        model.compile("sgd", loss, metrics=["mae"])
        history = model.fit(x, y, 6, epochs=2, shuffle=False, verbose=0)
        logs.append(
            {**history.history, **model.evaluate(x, y, return_dict=True)}
        )
    assert [*logs[0]] == [*logs[1]] and "size" in logs[1]
    for name, values in logs[0].items():
        np.testing.assert_allclose(logs[1][name], values, 1e-10)


class WarmedUp(Loop):
    """Reads what trains it: the weight of its own loss grows with the steps."""

    def call(self, x, training=False):
        y = super().call(x, training)
        if self.compiled:
            step = keras.ops.cast(self.optimizer.iterations, y.dtype)
            self.add_loss(step * keras.ops.mean(y * y))
        return y


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 3)])
def test_model_finds_itself_compiled(k, m):
    _, x, y, loss = MODELS["Loop"]
    weights = []
    for is_pipeline in (False, True):
        keras.utils.set_random_seed(3)
        own = WarmedUp()
        model = tfgpipe.GPipe(own, k, m) if is_pipeline else own
        how = {} if is_pipeline else {"jit_compile": False}
        model.compile("sgd", loss, **how)
        model.fit(x, y, 6, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert not own.compiled and not hasattr(own, "optimizer")
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, 1e-10)


class Hung(keras.Model):
    """Two outputs; its loss of one reads what hangs on that."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(4)

    def call(self, x):
        hidden = self.first(x)
        y = self.last(hidden)
        y.hidden = hidden
        return [y, hidden]


def test_losses_of_outputs_are_shown_where_one_reads_what_hangs_on_them():
    def loss(y, y_pred):
        hidden = keras.ops.mean(y_pred.hidden**2, -1)
        return keras.ops.mean((y - y_pred) ** 2, -1) + hidden

    x = np.random.default_rng(0).random((6, 4))
    logs = []
    for is_pipeline in (False, True):
        keras.utils.set_random_seed(3)
        model = tfgpipe.GPipe(Hung(), 2, 1) if is_pipeline else Hung()
        model.compile("sgd", [loss, "mse"])
        logs.append(model.fit(x, [x, x], verbose=0).history)
    assert [*logs[0]] == [*logs[1]] and len(logs[0]) == 3
    for name, values in logs[0].items():
        np.testing.assert_allclose(logs[1][name], values, 1e-12)


class Noisy(Loop):
    """Draws between layers, by a generator of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        x = keras.random.dropout(x, 0.5, seed=self.seed)
        return super().call(x, training)


def test_generator_of_a_model_is_in_its_file(tmp_path):
    _, x, y, loss = MODELS["Loop"]
    model = tfgpipe.GPipe(Noisy(), 2, 2)
    model.compile("sgd", loss)
    model.fit(x, y, 6, verbose=0)
    model.save(tmp_path / "noisy.keras")
    other = tfgpipe.load_model(
        tmp_path / "noisy.keras", custom_objects={"Noisy": Noisy}
    )
    found, expected = (m.predict(x, verbose=0) for m in (other, model))
    np.testing.assert_array_equal(found, expected)


class Mixing(Loop):
    def call(self, x, training=False):
        return super().call(x - keras.ops.mean(x, axis=0), training)


def test_model_with_a_call_of_its_own_that_mixes_rows_is_told():
    _, x, y, loss = MODELS["Loop"]
    model = tfgpipe.GPipe(Mixing(), 2, 3)
    model.compile("sgd", loss)
    with pytest.warns(
        UserWarning, match=r"Code of model 'mixing' mixes the rows"
    ):
        model.fit(x, y, 6, verbose=0)


class OwnStep(Loop):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda: tfgpipe.GPipe(OwnStep(), 2), "overrides train_step"),
        (lambda: tfgpipe.layers_of(Loop()), "known when it has run"),
        (
            lambda: tfgpipe.GPipe(Loop(), 6).build((None, 8)),
            r"number of layers, 5\. Received: num_partitions=6",
        ),
        (
            lambda: tfgpipe.GPipe(Loop(), 2, layers_per_cell=[1, 1]).build(
                (None, 8)
            ),
            r"Expected a sum of 5: \['dense'",
        ),
    ],
)
def test_what_needs_layers_by_themselves_is_refused(use, words):
    with pytest.raises(ValueError, match=words):
        use()
