"""Keras's callbacks around the training of a `GPipe`."""

import csv
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiny import (
    BATCH,
    Interrupt,
    assert_close,
    assert_same,
    compiled,
    data,
    fit,
    pipeline,
    random_layers,
    sequential,
    state,
    weights,
)

import tfgpipe

callbacks = keras.callbacks


@pytest.mark.usefixtures("float64")
def test_callbacks_of_the_learning_rate_give_what_keras_gives(tmp_path):
    def run(model, log):
        compiled(model, keras.optimizers.SGD(0.1), metrics=["mae"])
        history = fit(
            model,
            *data(),
            epochs=5,
            validation_data=data(5, seed=1),
            callbacks=[
                callbacks.LearningRateScheduler(
                    lambda epoch, rate: rate * 0.5 if epoch == 1 else rate
                ),
                callbacks.ReduceLROnPlateau(
                    "mae", factor=0.1, patience=1, min_delta=1.0
                ),
                callbacks.CSVLogger(log),
                callbacks.EarlyStopping(
                    "mae",
                    patience=3,
                    min_delta=0.5,
                    restore_best_weights=True,
                ),
            ],
        )
        with pathlib.Path(log).open() as file:
            return history, weights(model), list(csv.DictReader(file))

    found = run(pipeline(), str(tmp_path / "found.csv"))
    expected = run(sequential(), str(tmp_path / "expected.csv"))
    assert_close(found[:2], expected[:2])
    assert len(found[2]) == len(expected[2]) == len(found[0]["loss"]) < 5
    assert found[2][0].keys() == expected[2][0].keys()
    assert len(set(found[0]["learning_rate"])) > 2


def test_terminate_on_nan_stops_at_the_batch():
    model = compiled(pipeline())
    x, y = data()
    x[5] = np.nan
    batches = []
    note = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(logs["loss"])
    )
    fit(model, x, y, callbacks=[note, callbacks.TerminateOnNaN()])
    assert len(batches) == 2
    assert np.isnan(batches[-1])


@pytest.mark.parametrize(
    "ending",
    [".keras", pytest.param(".weights.h5", marks=pytest.mark.slow)],
)
def test_model_checkpoint_keeps_the_best_epoch(tmp_path, ending):
    path = str(tmp_path / f"best{ending}")
    model = compiled(pipeline(random_layers))
    history = fit(
        model,
        *data(),
        epochs=3,
        validation_data=data(5),
        callbacks=[
            callbacks.ModelCheckpoint(
                path,
                save_best_only=True,
                save_weights_only=ending == ".weights.h5",
            )
        ],
    )
    if ending == ".keras":
        loaded = tfgpipe.load_model(path)
    else:
        loaded = compiled(pipeline(random_layers, k=1))
        loaded.load_weights(path)
    score = loaded.evaluate(*data(5), BATCH, verbose=0)
    np.testing.assert_allclose(score, min(history["val_loss"]), rtol=1e-6)


def test_backup_and_restore_resumes_bit_identically(tmp_path):
    def run(k, *more):
        model = compiled(pipeline(random_layers, k=k))
        fit(model, *data(), epochs=3, callbacks=list(more))
        return state(model)

    def backup():
        return callbacks.BackupAndRestore(str(tmp_path / "backup"))

    with pytest.raises(KeyboardInterrupt):
        run(2, backup(), Interrupt(epoch=1, batch=2))
    assert_same(run(1, backup()), run(2))


def test_tensorboard_writes_losses_and_weights(tmp_path):
    pytest.importorskip("tensorboard")
    model = compiled(pipeline())
    board = callbacks.TensorBoard(
        str(tmp_path), histogram_freq=1, update_freq="batch", write_graph=True
    )
    fit(model, *data(), validation_data=data(5), callbacks=[board])
    tags = set()
    for path in tmp_path.glob("*/events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            tags |= {value.tag for value in event.summary.value}
    assert {"epoch_loss", "batch_loss"} <= tags
    assert any("kernel" in tag for tag in tags)


@pytest.mark.usefixtures("float64")
def test_swapping_in_averaged_weights_gives_what_keras_gives():
    def run(model):
        compiled(model, keras.optimizers.SGD(0.1, use_ema=True))
        return fit(
            model,
            *data(),
            validation_data=data(5),
            callbacks=[callbacks.SwapEMAWeights()],
        )

    assert_close(run(pipeline()), run(sequential()))
