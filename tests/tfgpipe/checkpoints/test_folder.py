"""Folders of checkpoints."""

import os

import pytest

from tfgpipe.checkpoints import Folder, Position
from tfgpipe.checkpoints.folder import Manifest


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
