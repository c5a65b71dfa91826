import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe
from tfgpipe.callbacks import PipelineMonitor, StopOnNonFinite

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
    for a, b in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
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


def test_single_mini_batch_is_named_so():
    stop = StopOnNonFinite(steps=1, say=None)
    trained([True, False, True], [stop])
    assert stop.reason.startswith("Stopped: the last mini-batch was not finite")


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


def test_replicas_stop_alike():
    stop = StopOnNonFinite(steps=2, say=None)
    with tfgpipe.PipelineStrategy(2, 2).scope():
        trained([True, False, False, True], [stop])
    assert "The loss is not finite" in stop.reason


def test_model_that_skips_nothing_is_refused():
    model = tfgpipe.GPipe([kl.Dense(4)], 1)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`skip_nonfinite=True`"):
        trained([True], [StopOnNonFinite()], model=model)
    plain = keras.Sequential([kl.Dense(4)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a Sequential"):
        trained([True], [StopOnNonFinite()], model=plain)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None])
def test_number_must_be_positive(steps):
    with pytest.raises(ValueError, match="`steps`"):
        StopOnNonFinite(steps=steps)
