"""Folders of checkpoints, and what each says of itself."""

import os

import pytest

from tfgpipe.checkpoints import Folder, Position
from tfgpipe.checkpoints import folder as folder_lib
from tfgpipe.checkpoints.folder import Damaged, Manifest


def add(folder, step, value=None):
    unfinished = folder.begin(step)
    monitored = None if value is None else {"name": "loss", "value": value}
    position = Position(step, 0, step)
    Manifest(position, {}, {}, monitored, [], {}).write(unfinished)
    folder.finish(unfinished, step)


def made(path, values=()):
    folder = Folder(path / "checkpoints")
    folder.take()
    folder.release()
    for i, value in enumerate(values):
        add(folder, i, value)
    return folder


def names_in(folder):
    return sorted(set(os.listdir(folder.path)) - {".lock"})


def test_folder_in_use_is_left_as_it_is(tmp_path):
    folder = made(tmp_path)
    folder.take()
    left = folder.begin(7)
    other = Folder(folder.path)
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
        other.take()
    assert left.is_dir()
    folder.release()
    other.take()
    assert not left.is_dir()


def test_steps_are_those_with_a_name(tmp_path):
    folder = made(tmp_path, [None, None])
    folder.begin(7)
    (folder.path / "others").mkdir()
    assert folder.steps() == [0, 1]
    assert Folder(tmp_path / "none").steps() == []


def test_what_was_left_unfinished_is_cleared(tmp_path):
    folder = made(tmp_path, [None])
    (folder.begin(7) / "values").write_text("some")
    (folder.path / ".unfinished-x").write_text("")
    Folder(folder.path).take()
    assert names_in(folder) == [folder.path_of(0).name]


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = made(tmp_path, [1.0])
    add(folder, 0, 2.0)
    assert folder.steps() == [0]
    assert folder.best("min", "loss") == 2.0
    assert folder.path_of(0).name == "step-0000000000.1"
    add(folder, 0, 3.0)
    assert names_in(folder) == ["step-0000000000.2"]


def test_address_is_refused():
    with pytest.raises(ValueError, match="folder='gs://bucket/run'"):
        Folder("gs://bucket/run")


@pytest.mark.parametrize(
    ("values", "mode", "left", "best"),
    [
        ([None] * 5, "min", [3, 4], None),
        ([3.0, 1.0, 2.0, 4.0], "min", [1, 2, 3], 1.0),
        ([3.0, 1.0, 2.0, 4.0], "max", [2, 3], 4.0),
        ([9.0, None, None, None], "max", [0, 2, 3], 9.0),
        ([1.0, 1.0, 5.0, 5.0], "min", [1, 2, 3], 1.0),
        ([1.0], "min", [0], 1.0),
        ([float("nan"), 3.0, 4.0, 5.0], "min", [1, 2, 3], 3.0),
    ],
)
def test_last_ones_and_the_best_are_kept(tmp_path, values, mode, left, best):
    folder = made(tmp_path, values)
    folder.keep(2, mode, "loss", 99)
    assert folder.steps() == left
    assert folder.best(mode, "loss") == best


def test_damaged_ones_are_left(tmp_path):
    folder = made(tmp_path, [None] * 4)
    (folder.path_of(0) / "manifest.json").write_text("{}")
    folder.keep(1, "min", None, 3)
    assert folder.steps() == [0, 3]


def test_later_ones_do_not_count_among_the_last(tmp_path):
    folder = made(tmp_path, [None] * 5)
    folder.keep(1, "min", None, 3)
    assert folder.steps() == [3, 4]


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Received: folder=.*file/checkpoints"):
        made(tmp_path / "file")


# ------------------------------------------------------------------ manifests
def written(folder, **changed):
    (folder / "values").write_bytes(b"some values")
    content = {
        "position": Position(7, 1, 2),
        "variables": {"model": [["a/kernel", [2, 3], "float32"]]},
        "files": {"values": folder_lib.file_record(folder / "values")},
        "monitored": {"name": "val_loss", "value": 0.1},
        "optimizer": ["Adam"],
        "versions": {"keras": "3"},
    }
    found = Manifest(**{**content, **changed})
    found.write(folder)
    return found


def test_manifest_is_read_as_it_was_written(tmp_path):
    expected = written(tmp_path)
    found = folder_lib.read_manifest(tmp_path)
    assert found == expected
    folder_lib.check_files(tmp_path, found)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[1, 2]", "cannot be read"),
        (lambda text: text.replace('"step": 7', '"step": 8'), "not as it was"),
        (lambda text: text.replace("kernel", "kernfl"), "not as it was"),
    ],
)
def test_damaged_manifest_is_told(tmp_path, damage, reason):
    written(tmp_path)
    path = tmp_path / folder_lib.NAME
    path.write_text(damage(path.read_text()))
    with pytest.raises(Damaged, match=reason):
        folder_lib.read_manifest(tmp_path)


def test_manifest_of_another_format_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lib, "FORMAT", 2)
    written(tmp_path)
    monkeypatch.setattr(folder_lib, "FORMAT", 1)
    with pytest.raises(Damaged, match="newer version"):
        folder_lib.read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "values is missing"),
        (lambda path: path.write_bytes(b"some"), "has 4 bytes instead of 11"),
        (lambda path: path.write_bytes(b"some valuet"), "not as it was writt"),
    ],
)
def test_damaged_file_is_told(tmp_path, damage, reason):
    found = written(tmp_path)
    damage(tmp_path / "values")
    with pytest.raises(Damaged, match=reason):
        folder_lib.check_files(tmp_path, found)
