import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.checkpoints import Folder, Position, Writer, writer
from tfgpipe.checkpoints.folder import read_manifest


def small():
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe([keras.Input((4,)), kl.Dense(4), kl.Dense(4)], 2)
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((4, 4)), np.ones((4, 4)))
    return model


def made(path, keep=2):
    folder = Folder(path)
    folder.take()
    return folder, Writer(folder, keep, "min", None)


def test_tensorflow_reads_what_is_written(tmp_path):
    model, (folder, saving) = small(), made(tmp_path)
    saving.start(model, Position(1, 0, 1), None)
    saving.wait()
    reader = tf.train.load_checkpoint(str(folder.path_of(1) / "values"))
    for i, v in enumerate(model.variables):
        np.testing.assert_array_equal(reader.get_tensor(f"model/{i}"), v)
    for i, v in enumerate(model.optimizer.variables):
        np.testing.assert_array_equal(reader.get_tensor(f"optimizer/{i}"), v)
    found = read_manifest(folder.path_of(1))
    assert found.versions["keras"] == keras.__version__
    assert {"values.index", "values.data-00000-of-00001"} == set(found.files)


def test_what_is_written_is_what_was_when_it_began(tmp_path, monkeypatch):
    model, (folder, saving) = small(), made(tmp_path)
    may_write, write = threading.Event(), writer._write_values

    def late(*arguments):
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(writer, "_write_values", late)
    expected = [v.numpy() for v in model.variables]
    saving.start(model, Position(1, 0, 1), None)
    for _ in range(3):  # while it is written
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 4)))
    assert folder.steps() == []
    may_write.set()
    saving.wait()
    reader = tf.train.load_checkpoint(str(folder.path_of(1) / "values"))
    for i, value in enumerate(expected):
        np.testing.assert_array_equal(reader.get_tensor(f"model/{i}"), value)
    assert not np.array_equal(expected[0], model.variables[0].numpy())


def test_full_disk_is_told_when_the_next_one_is_due(tmp_path, monkeypatch):
    model, (folder, saving) = small(), made(tmp_path)
    saving.start(model, Position(1, 0, 1), None)
    saving.wait()

    def full(folder, shards):
        (folder / "shard_0").write_text("a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write_values", full)
    saving.start(model, Position(2, 0, 2), None)
    with pytest.raises(OSError, match="No space left on device"):
        saving.start(model, Position(3, 0, 3), None)
    monkeypatch.undo()
    assert folder.steps() == [1]
    assert not list(tmp_path.glob(".unfinished*"))
    saving.start(model, Position(3, 0, 3), None)  # and on it goes
    saving.wait()
    assert folder.steps() == [1, 3]


def test_folder_that_hosts_do_not_share_is_told(tmp_path, monkeypatch):
    model, (_, saving) = small(), made(tmp_path)
    monkeypatch.setattr(
        writer, "_copied", lambda *_: {"CPU:0": {"a": tf.zeros(2)}}
    )
    monkeypatch.setattr(tf.raw_ops, "SaveV2", lambda **arguments: None)
    saving.start(model, Position(1, 0, 1), None)
    with pytest.raises(OSError, match="must have the folder in common"):
        saving.wait()


# --------------------------------------------------------- what is written
def layers():
    return [
        keras.Input((4,)),
        kl.Dense(4, name="a"),
        kl.BatchNormalization(name="b"),
        kl.Dropout(0.5, seed=1, name="c"),
        keras.Sequential([kl.Dense(4), kl.Dropout(0.5)], name="d"),
        kl.Dense(2, name="e"),
    ]


def described(model):
    model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    model.train_on_batch(np.ones((4, 4)), np.ones((4, 2)))
    found = writer.variable_records(writer.contents(model))
    for group, own in found.items():  # slots begin with the model's name
        names = [name.rsplit("/", 1)[-1] for name, *_ in own]
        kinds = [kind for _, *kind in own]
        found[group] = kinds if group == "optimizer" else [*zip(names, kinds)]
    return found


def test_variables_are_those_of_plain_keras_whatever_the_cells():
    expected = described(keras.Sequential(layers()))
    assert [v[0] for v in expected["model"]].count("seed_generator_state") == 2
    assert len(expected["optimizer"]) > 10
    for k in (1, 3):
        assert described(tfgpipe.GPipe(layers(), k, 2)) == expected


def test_model_that_skips_has_a_count():
    model = tfgpipe.GPipe(layers(), 2, skip_nonfinite=True)
    assert described(model)["skipped"] == [("Variable:0", [[], "int64"])]
