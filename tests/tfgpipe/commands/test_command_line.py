"""What commands do with flags, errors and Ctrl-C."""

import time

import pytest
from absl import flags

from tfgpipe.commands import command_line, progress

FLAGS = command_line.new_flags()
command_line.define_trained(FLAGS)
command_line.define_format(FLAGS)
flags.DEFINE_float("seconds", 1.0, "How long.", 0.0, flag_values=FLAGS)


def run(*words, body=lambda values: None):
    return command_line.run(
        "tools.x", FLAGS, "What x does.", body, ["x", *words]
    )


def test_flags_reach_the_work_and_can_be_parsed_again():
    seen = []
    for folder in ("a", "b"):
        assert not run(
            f"--train_dir={folder}",
            body=lambda values: seen.append(values.train_dir),
        )
    assert seen == ["a", "b"]


def test_program_in_long_silence_says_what_it_does(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_QUIET", 0.1)
    assert run(body=lambda values: time.sleep(0.15)) == 0
    assert capsys.readouterr().err == "tools.x: at work, 0 s\n"


def test_help_lists_the_flags(capsys):
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("What x does.")
    assert "--train_dir:" in shown and "--format:" in shown


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--seconds=nan", "--seconds must be finite. Received: nan"),
        ("--seconds=inf", "--seconds must be finite. Received: inf"),
        ("--format=xml", "should be one of <text|json|csv>"),
        ("--train_di=x", "Did you mean: train_dir"),
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
    "error", [ValueError, FileNotFoundError, ImportError, flags.Error]
)
def test_errors_of_what_was_given_exit_with_2(error, capsys):
    def body(values):
        raise error("`a` must be b.")

    assert run(body=body) == 2
    assert capsys.readouterr().err == "tools.x: `a` must be b.\n"


def test_interrupt_exits_with_130(capsys):
    def body(values):
        raise KeyboardInterrupt

    assert run(body=body) == 130
    assert capsys.readouterr().err == "tools.x: interrupted\n"


def test_mistakes_of_the_program_are_not_hidden():
    def body(values):
        raise AttributeError("x")

    with pytest.raises(AttributeError):
        run(body=body)
