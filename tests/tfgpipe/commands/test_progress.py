"""Counting on a terminal."""

import sys
import threading
import time

import pytest

from tfgpipe.commands import progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_count_is_one_line_of_a_terminal_and_goes_away(
    is_terminal, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert [*progress.progress("ab", "letters")] == ["a", "b"]
    shown = capsys.readouterr().err
    counts = [f"letters: {i} of 2, 0 s" for i in range(3)]
    expected = "".join(f"\r\033[K{text}" for text in [*counts, ""])
    assert shown == (expected if is_terminal else "")


def test_count_can_be_hidden(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = progress.Progress("lines", None, is_hidden=True)
    shown.add(3)
    shown.close()
    assert capsys.readouterr().err == ""


@pytest.fixture
def hasty(monkeypatch):
    """What is silent is so after a short time."""
    monkeypatch.setattr(progress, "_QUIET", 0.1)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_program_that_writes_nothing_says_what_it_is_doing(hasty, capsys):
    with progress.speaking("tools.x"):
        time.sleep(0.15)
        with progress.doing("counting"), progress.doing("cells"):
            time.sleep(0.2)
    first, *said = lines(capsys)
    assert first == "tools.x: at work, 0 s"
    wanted = "tools.x: counting, 0 s; cells, 0 s"
    assert wanted in said
    # On a busy machine, of the moments before and after it too.
    assert {*said} <= {wanted, "tools.x: counting, 0 s", first}


def test_the_same_is_said_again_after_twice_as_long(hasty, capsys):
    with progress.speaking("tools.x"), progress.doing("counting"):
        time.sleep(1.0)  # at 0.1, 0.3 and 0.7 s, or somewhat later
    said = lines(capsys)
    assert 2 <= len(said) <= 3
    assert said[0] == "tools.x: counting, 0 s"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_program_that_writes_says_nothing(stream, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_QUIET", 0.6)
    with progress.speaking("tools.x"), progress.doing("counting"):
        for _ in range(20):
            print("a line", file=getattr(sys, stream))
            time.sleep(0.05)
    assert "counting" not in capsys.readouterr().err


def test_program_that_waits_says_nothing(hasty, capsys):
    with progress.speaking("tools.x"), progress.doing(""):
        time.sleep(0.3)
    shown = progress.Progress("lines", None, is_hidden=True)
    with progress.speaking("tools.x"):
        time.sleep(0.3)
    shown.close()
    assert not lines(capsys)


def test_count_is_said_where_there_is_no_terminal(hasty, capsys):
    with progress.speaking("tools.x"):
        for letter in progress.progress("abc", "letters"):
            if letter == "b":
                time.sleep(0.2)
    said = lines(capsys)
    wanted = "tools.x: letters: 1 of 3, 0 s"
    assert wanted in said
    # On a busy machine, of the moments before and after it too.
    others = {f"tools.x: letters: {n} of 3, 0 s" for n in (0, 2, 3)}
    assert {*said} <= {wanted, "tools.x: at work, 0 s", *others}


def test_count_on_a_terminal_goes_on_in_its_line(hasty, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.speaking("tools.x"):
        for _ in progress.progress("a", "letters"):
            time.sleep(0.25)
    shown = capsys.readouterr().err
    assert shown.count("\r\033[Kletters: 0 of 1, 0 s") > 1
    assert "tools.x" not in shown


def test_line_of_a_terminal_that_has_begun_is_left(hasty, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress.speaking("tools.x"), progress.doing("counting"):
        print("1/8 [===>", end="")
        time.sleep(0.15)
    assert capsys.readouterr().err == "\ntools.x: counting, 0 s\n"


def test_streams_are_as_before_and_nothing_runs_on(hasty):
    before, streams = threading.active_count(), (sys.stdout, sys.stderr)

    def fail():
        with (
            progress.speaking("tools.x"),
            progress.doing("counting"),
            progress.speaking("tools.y"),  # a part of it
        ):
            assert threading.active_count() == before + 1
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert threading.active_count() == before
    assert all("write" not in vars(stream) for stream in streams)
