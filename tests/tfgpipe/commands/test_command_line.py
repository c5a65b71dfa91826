"""Flags, errors, Ctrl-C, sub-commands, and words in a long silence."""

import importlib
import threading
import time

import pytest
from absl import flags

from tfgpipe import __main__ as tfgpipe_main
from tfgpipe.commands import command_line
from tools.bench import __main__ as bench
from tools.results import __main__ as results

FLAGS = command_line.new_flags()
command_line.define_cells(FLAGS, 4)
flags.DEFINE_float("seconds", 1.0, "How long.", 0.0, flag_values=FLAGS)


def run(*words, body=lambda values: None):
    return command_line.run(
        "tools.x", FLAGS, "What x does.", body, ["x", *words]
    )


def test_flags_reach_the_work_and_can_be_parsed_again():
    for k in (2, 3):
        word = f"--num_partitions={k}"
        assert run(word, body=lambda values: values.num_partitions) == k


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--num_partitions=0", "positive integer"),
        ("--second=1", "Did you mean: seconds"),
        ("x", "only flags. Received: ['x']"),
    ],
)
def test_bad_flags_exit_with_2(word, message, capsys):
    assert run(word) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tools.x: ")
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        *((e, 2, "a") for e in (ValueError, FileNotFoundError, ImportError)),
        (KeyboardInterrupt, 130, "interrupted"),
    ],
)
def test_errors_of_what_was_given_have_a_code(error, code, said, capsys):
    def body(values):
        raise error("a")

    assert run(body=body) == code
    assert capsys.readouterr().err == f"tools.x: {said}\n"


# ------------------------------------------------------------- sub-commands
PROGRAMS = {
    "tfgpipe": (tfgpipe_main, "tfgpipe", "tfgpipe.commands"),
    "tools.bench": (bench, "python -m tools.bench", "tools.bench"),
    "tools.results": (results, "python -m tools.results", "tools.results"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_lists_the_commands_and_their_flags(program, capsys):
    module, called, package = PROGRAMS[program]
    assert module.main([program, "--help"]) == 0
    shown = capsys.readouterr().out
    for name, purpose in module.COMMANDS.items():
        assert name in shown and purpose in shown
    for name in module.COMMANDS:
        assert module.main([program, name, "--help"]) == 0
        shown = capsys.readouterr().out
        command = importlib.import_module(f"{package}.{name}")
        assert command.__doc__ in shown
        assert f"Usage: {called} {name} [FLAGS]" in shown
        for flag in {*command.FLAGS} - {"h", "help"}:
            assert f"{flag}:" in shown


# ------------------------------------------------- words in a long silence
def test_what_takes_long_is_said_and_again_after_twice_as_long(
    monkeypatch, capsys
):
    monkeypatch.setattr(command_line, "_QUIET", 0.1)
    before = threading.active_count()
    with command_line.doing("counting"):
        time.sleep(1.0)  # at 0.1, 0.3 and 0.7 s, or somewhat later
    assert threading.active_count() == before
    said = capsys.readouterr().err.splitlines()
    assert 2 <= len(said) <= 3 and {*said} <= {"counting, 0 s", "counting, 1 s"}


def test_progress_says_how_many_are_done(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "_QUIET", 0.1)
    for letter in command_line.progress("abc", "letters"):
        if letter == "b":
            time.sleep(0.15)
    assert "letters: 1 of 3, 0 s\n" in capsys.readouterr().err
