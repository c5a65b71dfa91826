"""Files are written whole or not at all, and errors name them."""

import contextlib
import errno
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
from keras import layers as kl
from processes import ROOT

import tfgpipe
from tfgpipe import files

NAMES = ["model.keras", "model.weights.h5"]


@pytest.fixture(scope="module")
def model():
    made = tfgpipe.GPipe([keras.Input((4,)), kl.Dense(50)], 1)
    made.compile("sgd", "mse")
    return made


def write(model, path):
    weights_only = str(path).endswith(".weights.h5")
    (model.save_weights if weights_only else model.save)(path)


def read(model, path):
    if str(path).endswith(".weights.h5"):
        model.load_weights(path)
    else:
        tfgpipe.load_model(path)


@contextlib.contextmanager
def full_disk(name):
    """Inside, no file grows beyond some bytes."""
    if name.endswith(".h5"):  # HDF5 itself may crash, later
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keras.Model, "save_weights", write_a_part)
            yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_a_part(_, path, *__):
    with open(path, "wb") as file:
        file.write(b"a part")
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def unwritten(path, *parts):
    parts = ["must be a file that can be", repr(str(path)), *parts, "Make room"]
    return pytest.raises(
        OSError, match="(?s)" + ".*".join(map(re.escape, parts))
    )


# ------------------------------------------------------------------- writing
@pytest.mark.parametrize("name", NAMES)
def test_full_disk_keeps_the_file_that_was_there(model, tmp_path, name):
    path = tmp_path / name
    with full_disk(name), unwritten(path, "File too large"):
        write(model, path)
    assert not os.listdir(tmp_path)  # no part of it
    write(model, path)
    before = path.read_bytes()
    with full_disk(name), unwritten(path, "File too large", "is as it was."):
        write(model, path)
    assert os.listdir(tmp_path) == [name]
    assert path.read_bytes() == before
    write(model, path)  # as advised
    read(model, path)


def test_folder_that_is_not_there_is_named(model, tmp_path):
    path = tmp_path / "none" / "model.keras"
    with unwritten(path, "No such file or directory"):
        model.save(path)


def test_link_stays_a_link(model, tmp_path):
    target, link = tmp_path / "first.keras", tmp_path / "last.keras"
    link.symlink_to(target)
    model.save(link)
    assert link.is_symlink()
    assert zipfile.is_zipfile(target)


@pytest.mark.parametrize("answer", ["y", "n"])
def test_file_that_must_not_be_replaced_is_asked_for(
    model, tmp_path, monkeypatch, answer
):
    path = tmp_path / "model.keras"
    path.write_text("old")
    monkeypatch.setattr("builtins.input", lambda _: answer)
    model.save(path, overwrite=False)
    assert zipfile.is_zipfile(path) == (answer == "y")


def test_directory_is_written_as_by_keras(model, tmp_path):
    model.save(tmp_path / "model", zipped=False)
    assert "config.json" in os.listdir(tmp_path / "model")
    found = tfgpipe.load_model(tmp_path / "model")
    for a, b in zip(found.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------- reading
def damaged(content):
    return {
        "cut_off": content[: len(content) // 2],
        "empty": b"",
        "other_bytes": content.replace(b'"class_name"', b'"class_nama"'),
        "text": b"a text",
    }


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in NAMES
        for damage in damaged(b"")
        if (name, damage) != ("model.weights.h5", "other_bytes")  # is not seen
    ],
)
def test_damaged_file_is_named_as_damaged(model, tmp_path, name, damage):
    path = tmp_path / name
    write(model, path)
    path.write_bytes(damaged(path.read_bytes())[damage])
    with pytest.raises(
        ValueError, match=f"{re.escape(repr(str(path)))}, which is damaged"
    ) as error:
        read(model, path)
    assert "take an earlier one" in str(error.value)


def test_training_goes_on_from_the_backup_before_a_damaged_one(model, tmp_path):
    """Keras takes an `OSError` for a damaged file."""
    backup = keras.callbacks.BackupAndRestore(
        str(tmp_path), double_checkpoint=True, delete_checkpoint=False
    )
    x = np.ones((4, *model.input_shape[1:]))
    y = np.ones((4, *model.output_shape[1:]))

    def fit(epochs):
        return model.fit(x, y, epochs=epochs, verbose=0, callbacks=[backup])

    fit(2)
    pathlib.Path(backup._weights_path).write_bytes(b"0")
    assert len(fit(4).epoch) >= 2


def test_file_that_is_not_there_is_not_called_damaged(model, tmp_path):
    with pytest.raises(ValueError, match=r"File not found.*model\.keras"):
        read(model, tmp_path / "model.keras")
    with pytest.raises(FileNotFoundError, match=r"model\.weights\.h5"):
        read(model, tmp_path / "model.weights.h5")


def test_error_of_a_layer_while_loading_is_its_own(tmp_path):
    @keras.saving.register_keras_serializable("files")
    class Vocabulary(kl.ReLU):
        @classmethod
        def from_config(cls, config):
            open(tmp_path / "words.txt").close()

    tfgpipe.GPipe([keras.Input((2,)), Vocabulary()], 1).save(
        tmp_path / "model.keras"
    )
    with pytest.raises(Exception, match=r"words\.txt") as error:
        tfgpipe.load_model(tmp_path / "model.keras")
    assert "damaged" not in str(error.value)


# ----------------------------------------------------------------------- locks
HOLDER = """
import importlib.util, pathlib, signal, sys
spec = importlib.util.spec_from_file_location("files", "tfgpipe/files.py")
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
lock = files.FolderLock(pathlib.Path(sys.argv[1]), "folder")
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the folder; starts without TensorFlow."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_folder_in_use_is_refused_with_its_holder(tmp_path, holder):
    match = f"`folder` must not be .* by process {holder.pid} on .* since"
    with pytest.raises(ValueError, match=match):
        files.FolderLock(tmp_path, "folder")
    with pytest.raises(ValueError, match="Wait until that one has ended"):
        files.FolderLock(tmp_path / "." / "", "folder")


def test_lock_of_a_killed_process_does_not_block(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lock = files.FolderLock(tmp_path, "folder")
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
    lock.release()
    lock.release()
    files.FolderLock(tmp_path, "folder")


def test_lock_that_cannot_be_had_is_an_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(OSError, match="lock"):
        files.FolderLock(tmp_path, "folder")


def test_lock_writes_to_no_file_that_a_link_names(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="lock"):
        files.FolderLock(tmp_path, "folder")
    assert (tmp_path / "mine").read_text() == "precious"


def test_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks.*No locks available"):
        files.FolderLock(tmp_path, "folder")


def test_forked_process_keeps_no_lock(tmp_path):
    lock = files.FolderLock(tmp_path, "folder")
    code = "import os, signal\n" + HOLDER.replace(
        "signal.pause()",
        "child = os.fork()\n"
        "if child:\n"
        "    print(child, flush=True)\n"
        "else:\n"
        "    signal.pause()",
    )
    lock.release()
    done = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert done.stdout.readline() == b"held\n"
    child = int(done.stdout.readline())
    done.wait()
    try:
        files.FolderLock(tmp_path, "folder")
    finally:
        os.kill(child, signal.SIGKILL)
        done.stdout.close()
