"""Models with a `call` of their own train as in Keras, cut at any layer."""

import keras
import numpy as np
import pytest
from keras import layers as kl
from quick import quick

import tfgpipe
from tools.zoo.own_calls import SAMPLES, TransformerBlock

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 8)), RNG.normal(size=(12, 4))


def trained(name, k, m=1, **arguments):
    """Losses, weights, outputs; of plain Keras for K = 0."""
    keras.utils.set_random_seed(3)
    own, x = SAMPLES[name].make(), SAMPLES[name].inputs()
    rng = np.random.default_rng(1)
    y = keras.tree.map_structure(lambda t: rng.normal(size=t.shape), own(x))
    model = tfgpipe.GPipe(own, k, m, **arguments) if k else own
    how = {} if k else {"jit_compile": False}
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **how)
    history = model.fit(x, y, 4, epochs=2, shuffle=False, verbose=0).history
    outputs = model.predict(x, 4, verbose=0)
    weights = [*map(np.array, own.get_weights())]
    return history["loss"], weights, keras.tree.flatten(outputs)


# Without dropout and batch normalisation several micro-batches are Keras's.
CASES = quick(
    [name for name, sample in SAMPLES.items() if not sample.is_whole],
    ["python state"],
)
# The gradients of three uses of a weight and more are added in another order.
USED_OFTEN = {"time loop"}


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("name", CASES)
def test_model_with_a_call_of_its_own_has_the_bits_of_keras(name):
    found, expected = trained(name, 2), trained(name, 0)
    np.testing.assert_allclose(found[0], expected[0], 1e-12)
    for a, b in zip(found[1], expected[1], strict=True):
        if name in USED_OFTEN:
            np.testing.assert_allclose(a, b, 1e-12, 1e-15)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_of_a_model_with_a_call_of_its_own_are_keras_s(name):
    """And the same bits at another K, where halves of tasks are cut, too."""
    expected = trained(name, 0)
    how = {"schedule": "zero_bubble", "remat": "never"}
    first, other = trained(name, 1, 3, **how), trained(name, 2, 3, **how)
    for found, reference in zip(first, expected):
        for a, b in zip(found, reference, strict=True):
            np.testing.assert_allclose(a, b, 1e-8, 1e-10)
    for a, b in zip(first[1], other[1], strict=True):
        np.testing.assert_array_equal(a, b)


class Loop(keras.Model):
    """A list of layers, a branch of Python, operations between layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [kl.Dense(8, "tanh") for _ in range(4)]
        self.out = kl.Dense(4)

    def call(self, x, training=False):
        for i, block in enumerate(self.blocks):
            x = x + block(x) if i % 2 else block(x) * 0.5
        return self.out(x if training else x * 1.0)


def both(make, k, m, loss="mse", y=Y, **compiled):
    """The model, and logs and weights: of plain Keras, and of a pipeline."""
    for is_pipeline in (False, True):
        keras.utils.set_random_seed(3)
        own = make()
        model = tfgpipe.GPipe(own, k, m) if is_pipeline else own
        how = {} if is_pipeline else {"jit_compile": False}
        model.compile("sgd", loss, **compiled, **how)
        logs = model.fit(X, y, 6, epochs=2, shuffle=False, verbose=0).history
        logs |= model.evaluate(X, y, return_dict=True, verbose=0)
        yield own, logs, model.get_weights()


def assert_alike(expected, found):
    assert [*expected[1]] == [*found[1]]
    for name, values in expected[1].items():
        np.testing.assert_allclose(found[1][name], values, 1e-10)
    for a, b in zip(found[2], expected[2]):
        np.testing.assert_allclose(a, b, 1e-10)


def test_cells_begin_inside_of_layers_too():
    blocks = keras.Sequential([TransformerBlock(8, 2, 16)], name="blocks")
    model = tfgpipe.GPipe(keras.Sequential([blocks]), 4, 1)
    model.build((None, 6, 8))
    assert len(model.cells()) == 4


class Noisy(Loop):
    """Draws between layers, by a generator of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        x = keras.random.dropout(x, 0.5, seed=self.seed)
        return super().call(x, training)


def test_file_of_a_model_with_a_call_of_its_own_goes_on_at_another_k(tmp_path):
    path = tmp_path / "own.keras"
    model = tfgpipe.GPipe(Noisy(), 2, 2)
    model.compile("adam", "mse")
    model.fit(X, Y, 6, verbose=0)
    model.save(path)
    names = {"Noisy": Noisy}
    other = tfgpipe.load_model(path, num_partitions=3, custom_objects=names)
    for one in (model, other):
        one.fit(X, Y, 6, shuffle=False, verbose=0)
    found, expected = (m.predict(X, verbose=0) for m in (other, model))
    np.testing.assert_array_equal(found, expected)
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
    expected, found = both(Measured, k, m, metrics=["mae"])
    assert "size" in found[1]
    assert_alike(expected, found)


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
    expected, found = both(WarmedUp, k, m)
    assert not found[0].compiled and not hasattr(found[0], "optimizer")
    assert_alike(expected, found)


class Twice(keras.Model):
    """One tensor is two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = kl.Dense(4), kl.Dense(4)

    def call(self, x):
        return [self.last(self.first(x))] * 2


def whole_loss(y, y_pred):
    return keras.ops.mean((y - y_pred) ** 2 + y_pred**2, -1)


@pytest.mark.parametrize("m", [1, 3])
def test_tensor_that_losses_read_twice_has_both_gradients(m):
    """With one micro-batch, each place had the gradients of all."""
    expected, found = both(Twice, 2, m, [whole_loss, "mse"], [Y, Y])
    assert len(found[1]) == 3
    assert_alike(expected, found)


class Mixing(Loop):
    def call(self, x, training=False):
        return super().call(x - keras.ops.mean(x, axis=0), training)


def test_model_with_a_call_of_its_own_that_mixes_rows_is_told():
    model = tfgpipe.GPipe(Mixing(), 2, 3)
    model.compile("sgd", "mse")
    with pytest.warns(
        UserWarning, match=r"Code of model 'mixing' mixes the rows"
    ):
        model.fit(X, Y, 6, verbose=0)


class OwnStep(Loop):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda: tfgpipe.GPipe(OwnStep(), 2), "overrides train_step"),
        (
            lambda: tfgpipe.layers_of(Loop()),
            "must be a functional `keras.Model`",
        ),
        (
            lambda: tfgpipe.GPipe(Loop(), 6).build((None, 8)),
            r"number of layers, 5\. Received: num_partitions=6",
        ),
        (
            lambda: tfgpipe.GPipe(Loop(), 2, layers_per_cell=[1, 1]).build(
                (None, 8)
            ),
            r"must have a sum of 5: \['dense'",
        ),
    ],
)
def test_what_needs_layers_by_themselves_is_refused(use, words):
    with pytest.raises(ValueError, match=words):
        use()
