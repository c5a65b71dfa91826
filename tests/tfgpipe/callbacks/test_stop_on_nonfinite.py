"""Training that ends where nothing is finite, and the first cause."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from quick import quick
from tiny import assert_same

import tfgpipe
from tfgpipe.callbacks import PipelineMonitor, StopOnNonFinite
from tfgpipe.callbacks.stop_on_nonfinite import first_nonfinite

BATCH = 4


def trained(good, callbacks, epochs=1, compiling=None, model=None, **fit):
    """Trains on mini-batches that are good or not; the model and history."""
    if model is None:
        keras.utils.set_random_seed(1)
        layers = [kl.Dense(4, name="first"), kl.Dense(4, name="second")]
        model = tfgpipe.GPipe(layers, 2, 2, skip_nonfinite=True)
        model.compile("adam", "mse", **(compiling or {}))
    x = np.ones((len(good) * BATCH, 4), "float32")
    y = x.copy()
    for i, is_good in enumerate(good):
        if not is_good:
            y[i * BATCH + 1] = np.nan
    history = model.fit(
        x,
        y,
        BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **fit,
    )
    return model, history.history


def test_fit_ends_after_so_many_in_a_row():
    said = []
    stop = StopOnNonFinite(steps=2, say=said.append)
    good = [True, False, True, False, False, True, True]
    model, history = trained(good, [stop], epochs=3)
    assert history["skipped_steps"] == [3]
    assert model.optimizer.iterations == 2
    assert said == [stop.reason]
    assert stop.reason.startswith(
        "Stopped: the last 2 mini-batches were not finite, and were skipped. "
        "The loss is not finite, and the outputs of all layers are"
    )


def test_fit_goes_on_as_without_it():
    good = [True, False, True, True, False]
    stop = StopOnNonFinite(steps=2)
    model, history = trained(good, [stop])
    other, expected = trained(good, [])
    assert stop.reason is None
    assert history == expected
    assert_same(model.variables, other.variables)
    before = model.train_function
    trained(good, [], model=model)
    assert model.train_function is before  # given back


def test_mini_batches_of_the_last_fit_do_not_count():
    stop = StopOnNonFinite(steps=2, say=None)
    model, _ = trained([True, False], [stop])
    trained([False, True, False], [stop], model=model)
    assert stop.reason is None
    trained([False], [stop], model=model)
    assert stop.reason is None
    trained([False, False], [stop], model=model)
    assert "the last 4 mini-batches" in stop.reason
    trained([True], [stop], model=model)
    assert stop.reason is None


def test_several_steps_are_one_call():
    stop = StopOnNonFinite(steps=3, say=None)
    good = [True, False, False, False, True, True]
    trained(good, [stop], compiling={"steps_per_execution": 2})
    assert "the last 3 mini-batches" in stop.reason
    assert "The loss is not finite" in stop.reason


@pytest.mark.parametrize(
    "monitor_first", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_monitor_measures_beside_it(monitor_first):
    """Of the step that it measures, the mini-batch is not kept."""
    stop = StopOnNonFinite(steps=2, say=None)
    both = [stop, PipelineMonitor(say=None)]
    if monitor_first:
        both.reverse()
    good = [True] * 3 + [False] * 2
    _, history = trained(good, both)
    assert "bubble" in history
    assert "The loss is not finite" in stop.reason


def test_nothing_is_kept_after_an_error():
    class Broken(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("broken")

    model, _ = trained([True], [])
    stop = StopOnNonFinite(say=None)
    with pytest.raises(RuntimeError, match="broken"):
        trained([True, True], [Broken(), stop], model=model)
    trained([True, True], [], model=model)
    assert stop._keeper.data is None


def test_model_that_skips_nothing_is_refused():
    model = tfgpipe.GPipe([kl.Dense(4)], 1)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`skip_nonfinite=True`"):
        trained([True], [StopOnNonFinite()], model=model)


# -------------------------------------------------------- the first cause
ROWS = 8


class Root(kl.Layer):
    """Square roots, whose gradient at 0 is infinite."""

    def call(self, x):
        return tf.sqrt(tf.abs(x))


class Weighted(kl.Layer):
    """Adds a weight, whose gradient alone can be infinite."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="zeros", name="w")

    def call(self, x):
        return x + tf.sqrt(self.weight)


def model_of(layers, k=3, m=2, loss="mse", **options):
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe(layers, k, m, **options)
    model.compile("sgd", loss)
    model.build((None, 4))
    return model


def data(x=1.0, y=1.0):
    inputs, labels = np.ones((ROWS, 4)), np.ones((ROWS, 4))
    inputs[-1], labels[-1] = x, y  # in the last micro-batch
    return tf.constant(inputs, "float32"), tf.constant(labels, "float32")


def dense(name, **options):
    return kl.Dense(4, name=name, **options)


def logarithm():
    return kl.Lambda(keras.ops.log, name="logarithm")


def root_loss(y, y_pred):
    return tf.reduce_mean(tf.sqrt(tf.abs(y - y_pred)), axis=-1)


# Layers, what the last rows of x and y are, the loss, and what is said.
FIRST = {
    "inputs": (
        lambda: [dense("a"), kl.Rescaling(np.inf), dense("b")],
        (np.nan, 1.0),
        "mse",
        "The inputs of the mini-batch are not finite.",
    ),
    "outputs": (
        lambda: [kl.ReLU(), logarithm(), dense("b"), dense("c")],
        (-1.0, 1.0),
        "mse",
        "The outputs of layer 'logarithm' of cell 0 on",
    ),
    "labels": (
        lambda: [dense("a"), dense("b"), dense("c")],
        (1.0, np.inf),
        "mse",
        "The loss is not finite, and the outputs of all",
    ),
    "gradient of inputs": (
        lambda: [
            dense("a"),
            dense("b", kernel_initializer="zeros"),  # and so its outputs
            Root(name="root"),
            dense("c"),
        ],
        (1.0, 1.0),
        "mse",
        "The gradient with respect to the inputs of layer 'root' of",
    ),
    "gradient of a weight": (
        lambda: [dense("a"), Weighted(name="sum"), dense("c")],
        (1.0, 1.0),
        "mse",
        "The gradient of the weight 'g_pipe/sum/w' of layer 'sum'",
    ),
    "gradient of the loss": (
        lambda: [dense("a"), kl.Rescaling(1.0), kl.Rescaling(0.0)],
        (1.0, 0.0),
        root_loss,
        "The gradient of the loss with respect to the outputs",
    ),
    "nothing": (
        lambda: [dense("a"), dense("b"), dense("c")],
        (1.0, 1.0),
        "mse",
        "Run again, layer by layer, all its values are finite",
    ),
}


@pytest.mark.parametrize("case", FIRST)
def test_what_is_not_finite_first_is_told(case):
    make, rows, loss, words = FIRST[case]
    model = model_of(make(), loss=loss)
    assert first_nonfinite(model, data(*rows)).startswith(words)


@pytest.mark.parametrize("is_functional", quick([False, True], [True]))
def test_nothing_changes(is_functional):
    def layers():
        made = [
            dense("a"),
            kl.BatchNormalization(name="normal"),
            kl.Dropout(0.5, seed=1, name="drop"),
            dense("c"),
        ]
        if not is_functional:
            return made
        inputs = keras.Input((4,))
        outputs = inputs
        for layer in made:
            outputs = layer(outputs)
        return keras.Model(inputs, kl.Add(name="skip")([outputs, inputs]))

    model = model_of(layers(), k=2, schedule="1f1b", skip_nonfinite=True)
    before = [v.numpy() for v in [*model.variables, *model.metrics_variables]]
    assert "'drop'" not in first_nonfinite(model, data(y=np.nan))
    after = [v.numpy() for v in [*model.variables, *model.metrics_variables]]
    assert_same(before, after)
    assert model.skipped_in_a_row == 0
    logs = model.train_on_batch(*data(), return_dict=True)
    assert np.isfinite(logs["loss"])
    assert logs["skipped_steps"] == 0


def test_what_only_overflows_when_it_is_kept_is_told():
    """All values are finite; a square of a gradient, or state, is not."""
    model = model_of([dense("a"), dense("b")], k=2, loss="mae")
    x, y = data(y=3.0)
    weight = tf.constant([1.0] * (ROWS - 1) + [1e25])
    sentence = first_nonfinite(model, (x, y, weight))
    assert "the sum of squares of a gradient" in sentence
    model = model_of([kl.BatchNormalization(), dense("b")], k=2)
    sentence = first_nonfinite(model, data(x=1e20))
    assert "state that it would leave, such as a moving variance" in sentence
