"""Scalars in files: every step once, whatever was interrupted."""

import pathlib

import pytest

from tfgpipe.monitor import EventLog
from tools.train import event_log


def write(folder, steps, first_step=0):
    event_log.forget_after(folder, first_step)
    log = EventLog(folder)
    for step in steps:
        log.write(step, {"train/loss": 10.0 - step, "rate": 0.5 * step})
    log.close()


def test_what_was_written_is_read(tmp_path):
    write(tmp_path / "log", [2, 4])
    assert event_log.read(tmp_path / "log") == {
        "train/loss": [(2, 8.0), (4, 6.0)],
        "rate": [(2, 1.0), (4, 2.0)],
    }


def test_folder_that_is_missing_has_no_scalars(tmp_path):
    assert event_log.read(tmp_path / "none") == {}


def test_steps_that_are_done_again_are_there_once(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    write(tmp_path, [5, 6], first_step=4)
    write(tmp_path, [3, 4, 5], first_step=2)
    steps = [step for step, _ in event_log.read(tmp_path)["rate"]]
    assert steps == [1, 2, 3, 4, 5]


def test_run_that_begins_anew_forgets_all(tmp_path):
    write(tmp_path, [1, 2])
    write(tmp_path, [1])
    assert event_log.read(tmp_path)["rate"] == [(1, 0.5)]
    assert not list(tmp_path.glob("partial*"))


@pytest.mark.parametrize("lost", [1, 30])
def test_file_of_a_killed_process_is_read_as_far_as_it_goes(tmp_path, lost):
    write(tmp_path, [1, 2, 3])
    (path,) = tmp_path.glob("events.out.tfevents.*")
    pathlib.Path(path).write_bytes(path.read_bytes()[:-lost])
    assert event_log.read(tmp_path)["train/loss"] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
    ]
    assert event_log.read(tmp_path)["rate"] == [(1, 0.5), (2, 1.0)]
    write(tmp_path, [2], first_step=1)
    assert event_log.read(tmp_path)["rate"] == [(1, 0.5), (2, 1.0)]


def test_rest_of_a_kill_is_cleared_and_no_link_followed(tmp_path):
    write(tmp_path, [1, 2])
    (path,) = tmp_path.glob("events.out.tfevents.*")
    (tmp_path / f".{'0' * 32}.{path.name}").write_text("half")
    (tmp_path / "mine").write_text("precious")
    (tmp_path / f"partial.{path.name}").symlink_to(tmp_path / "mine")
    write(tmp_path, [2], first_step=1)
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "mine").read_text() == "precious"
