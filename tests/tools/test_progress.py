"""Counting on a terminal."""

import sys

import pytest

from tools import progress


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
