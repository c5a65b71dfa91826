import os
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from tiny import assert_same

import tfgpipe
from tfgpipe.callbacks import Checkpoint
from tfgpipe.checkpoints import Folder, writer

BATCH = 4


def trained(callbacks, num_batches=6, epochs=2, model=None, **options):
    if model is None:  # plain Keras, which takes no time
        layers = [keras.Input((4,)), kl.Dense(4), kl.Dense(4)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    x = np.ones((num_batches * BATCH, 4))
    model.fit(
        x,
        x,
        BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
        **options,
    )
    return model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 9}, [6, 12]),
        ({"keep": 1}, [12]),
        ({"every": 4, "keep": 9}, [4, 8, 12]),
        ({"every": 5, "keep": 9}, [5, 10, 12]),
        ({"every": 5, "keep": 2}, [10, 12]),
        ({"every": 100}, [12]),
    ],
)
def test_steps_that_are_due_are_saved(tmp_path, options, expected):
    trained([Checkpoint(tmp_path, **options)])
    assert Folder(tmp_path).steps() == expected


@pytest.mark.parametrize(
    ("every", "num_batches", "steps", "position"),
    [
        (5, 8, [8, 12, 16], (8, 1, 0)),  # due within the epoch's last call
        (3, 6, [4, 6, 10, 12], (4, 0, 4)),
    ],
)
def test_several_steps_of_a_call_are_counted(
    tmp_path, every, num_batches, steps, position
):
    model = tfgpipe.GPipe([keras.Input((4,)), kl.Dense(4)], 1)
    model.compile("sgd", "mse", steps_per_execution=4)
    save = Checkpoint(tmp_path, every=every, keep=9)
    trained([save], num_batches=num_batches, model=model)
    assert Folder(tmp_path).steps() == steps
    restored = tfgpipe.restore(model, tmp_path, step=steps[0])
    assert restored[1:] == position


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_epoch_of_unknown_length_ends_where_it_ends(tmp_path):
    model = tfgpipe.GPipe([keras.Input((4,)), kl.Dense(4)], 1)
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensors((np.ones(4), np.ones(4))).repeat(12)
    data = rows.filter(lambda *_: True).batch(4)
    save = Checkpoint(tmp_path, every=3, keep=9)
    model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[save])
    assert Folder(tmp_path).steps() == [3, 6]
    assert tfgpipe.restore(model, tmp_path, step=3)[1:] == (3, 1, 0)


class Losses(keras.callbacks.Callback):
    """Puts numbers into the logs."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["val_own"] = self.values[epoch]


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("auto", [3.0, 1.0, 2.0, 5.0], [2, 4]),
        ("max", [3.0, 4.0, 2.0, 1.0], [2, 4]),
        ("min", [3.0, np.nan, 4.0, 5.0], [1, 4]),
    ],
)
def test_best_one_is_kept_besides_the_last(tmp_path, mode, values, expected):
    save = Checkpoint(tmp_path, 100, keep=1, best="val_own", mode=mode)
    trained([Losses(values), save], num_batches=1, epochs=4)
    assert Folder(tmp_path).steps() == expected


def test_folder_that_cannot_be_written_is_told_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    model = tfgpipe.GPipe([keras.Input((4,)), kl.Dense(4)], 1)
    model.compile("sgd", "mse")
    with pytest.raises(OSError, match="File exists"):
        trained([Checkpoint(tmp_path / "file")], model=model)
    assert model.optimizer.iterations == 0


def test_error_of_the_disk_reaches_fit_and_the_model_goes_on(
    tmp_path, monkeypatch
):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    model = trained([Checkpoint(tmp_path)], epochs=1)
    monkeypatch.setattr(writer, "_write_values", full)
    save = Checkpoint(tmp_path, every=1)
    with pytest.raises(OSError, match="checkpoints before are whole"):
        trained([save], model=model)
    monkeypatch.undo()
    assert Folder(tmp_path).steps() == [6]
    before = int(model.optimizer.iterations)
    assert 6 < before < 12
    trained([save], model=model)
    assert Folder(tmp_path).steps()[-1] == before + 12


class Broken(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        raise RuntimeError("broken")


@pytest.fixture
def handled():
    """Signals do what they do in a process that a terminal has started."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {
        number: signal.signal(number, f) for number, f in handlers.items()
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Signal(keras.callbacks.Callback):
    """Sends a signal to this process within a step."""

    def __init__(self, number, batch):
        super().__init__()
        self.number, self.batch = number, batch

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.batch:
            os.kill(os.getpid(), self.number)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 76)],
)
def test_signal_saves_and_ends_the_process(tmp_path, number, code):
    before = signal.getsignal(number)
    save = Checkpoint(tmp_path, on_signal=True)
    with pytest.raises(SystemExit) as caught:
        trained([Signal(number, 2), save])
    assert caught.value.code == code
    assert Folder(tmp_path).steps() == [3]
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("handled")
def test_signal_that_is_ignored_stays_ignored(tmp_path):
    """As `nohup` asks for."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    save = Checkpoint(tmp_path, on_signal=True)
    trained([Signal(signal.SIGHUP, 1), save], epochs=1)
    assert Folder(tmp_path).steps() == [6]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.usefixtures("handled")
def test_signal_after_an_error_does_what_it_did(tmp_path):
    model = trained([], epochs=1)
    with pytest.raises(RuntimeError, match="broken"):
        trained([Broken(), Checkpoint(tmp_path, on_signal=True)], model=model)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # in a `fit` without it, too
        trained([Signal(signal.SIGINT, 1)], model=model)


@pytest.mark.usefixtures("handled")
def test_signal_at_the_very_end_is_not_lost(tmp_path):
    class AtTheEnd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            os.kill(os.getpid(), signal.SIGTERM)

    save = Checkpoint(tmp_path, on_signal=True)
    with pytest.raises(SystemExit) as caught:
        trained([save, AtTheEnd()], epochs=1)
    assert caught.value.code == 75


@pytest.mark.usefixtures("handled")
def test_two_callbacks_give_the_handlers_back(tmp_path):
    both = [Checkpoint(tmp_path / name, on_signal=True) for name in "ab"]
    trained(both)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("handled")
def test_signal_in_the_last_mini_batch_ends_the_epoch(tmp_path):
    model = trained([], epochs=1)
    save = Checkpoint(tmp_path, on_signal=True)
    with pytest.raises(SystemExit):
        trained([Signal(signal.SIGTERM, 5), save], model=model)
    assert tfgpipe.restore(model, tmp_path)[1:] == (12, 1, 0)


# ------------------------------------------------------- where a training is
class Stop(keras.callbacks.Callback):
    """Ends the training within an epoch, or at its end."""

    def __init__(self, batch=None, epoch=None):
        super().__init__()
        self.batch, self.epoch = batch, epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= batch == self.batch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= epoch == self.epoch


def test_finished_training_is_not_saved_again(tmp_path):
    for _ in range(3):
        model = trained([], epochs=0)
        found = tfgpipe.restore(model, tmp_path)
        trained(
            [Checkpoint(tmp_path, resumed=found)],
            model=model,
            initial_epoch=found.epoch if found else 0,
        )
    assert found[1:] == (12, 2, 0)


def test_folder_with_later_steps_is_refused(tmp_path):
    trained([Checkpoint(tmp_path, keep=9)])
    with pytest.raises(ValueError, match=r"steps \[6, 12\], and a model at st"):
        trained([Checkpoint(tmp_path)])
    model = trained([], epochs=0)
    tfgpipe.restore(model, tmp_path, step=6)
    with pytest.raises(ValueError, match=r"with steps \[12\], and .* step 6"):
        trained([Checkpoint(tmp_path)], model=model)


def test_folder_of_a_training_that_runs_is_refused(tmp_path):
    """What the first one is writing stays, and it goes on."""

    class Second(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                left = Folder(tmp_path).begin(99)
                with pytest.raises(ValueError, match="must not be in use by"):
                    trained([Checkpoint(tmp_path)], epochs=1)
                left.rmdir()

    trained([Checkpoint(tmp_path, every=1, keep=99), Second()], epochs=1)
    assert Folder(tmp_path).steps() == [*range(1, 7)]
    with pytest.raises(ValueError, match="must not be in use by"):
        trained([Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "a")])


def test_folder_is_free_when_a_training_has_ended_however(tmp_path):
    first = Checkpoint(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        trained([first, Broken()])
    trained([Checkpoint(tmp_path)], epochs=1)
    with pytest.raises(ValueError, match="later steps"):
        trained([first])
    model = trained([], epochs=0)
    tfgpipe.restore(model, tmp_path)
    trained([Checkpoint(tmp_path)], model=model)


def test_damaged_step_is_passed_again(tmp_path):
    trained([Checkpoint(tmp_path, keep=1, every=6)])
    trained([Checkpoint(tmp_path / "b", keep=9)])
    path = Folder(tmp_path / "b").path_of(12) / "values.index"
    path.write_bytes(b"")
    model = trained([], epochs=0)
    with pytest.warns(UserWarning, match="Left as it is"):
        found = tfgpipe.restore(model, tmp_path / "b")
    save = Checkpoint(tmp_path / "b", every=2, keep=1)
    trained([save], model=model, initial_epoch=found.epoch)
    assert Folder(tmp_path / "b").path_of(12).name == "step-0000000012.1"
    assert tfgpipe.restore(model, tmp_path / "b").step == 12


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=4),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(), initial_scale=2.0**127
        ),
    ],
    ids=["accumulated", "overflowing"],
)
def test_steps_that_the_optimizer_does_not_count_are_counted(
    tmp_path, optimizer
):
    def new():
        model = tfgpipe.GPipe([keras.Input((4,)), kl.Dense(4)], 1)
        model.compile(optimizer(), "mse")
        return model

    save = Checkpoint(tmp_path, every=4, keep=9)
    trained([save], model=new())
    assert Folder(tmp_path).steps() == [4, 8, 12]
    model = new()
    found = tfgpipe.restore(model, tmp_path)
    trained([save], model=model, initial_epoch=found.epoch, epochs=3)
    assert Folder(tmp_path).steps() == [4, 8, 12, 16, 18]


def test_training_that_ends_within_an_epoch_goes_on_there(tmp_path):
    save = Checkpoint(tmp_path, every=100)
    trained([Stop(batch=3), save])
    model = trained([], epochs=0)
    assert tfgpipe.restore(model, tmp_path)[1:] == (4, 0, 4)


def test_last_checkpoint_has_the_weights_of_the_training(tmp_path):
    """Not the averages, nor the best, that `fit` ends with."""

    def new():
        keras.utils.set_random_seed(2)
        model = tfgpipe.GPipe([keras.Input((4,)), kl.Dense(4)], 1)
        model.compile(
            keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "mse"
        )
        return model

    expected = trained([], model=new()).get_weights()
    trained([Checkpoint(tmp_path, every=4)], model=new(), epochs=1)
    model = new()
    found = tfgpipe.restore(model, tmp_path)
    assert found[1:] == (6, 1, 0)
    trained([], model=model, initial_epoch=1)
    assert_same(model.get_weights(), expected)


def test_end_that_was_not_known_is_told(tmp_path):
    save = Checkpoint(tmp_path, every=100)
    with pytest.warns(UserWarning, match="must come after callbacks that end"):
        trained([save, Stop(epoch=0)])
    assert Folder(tmp_path).steps() == []


@pytest.mark.usefixtures("handled")
def test_second_signal_does_not_wait(tmp_path):
    save = Checkpoint(tmp_path, on_signal=True)

    class Twice(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trained([Twice(), save])
    assert Folder(tmp_path).steps() == []


def test_signals_need_the_main_thread(tmp_path):
    found = []

    def run():
        try:
            trained([Checkpoint(tmp_path, on_signal=True)])
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "outside of the main thread" in found[0]
