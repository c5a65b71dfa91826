"""Programs with sub-commands: which there are, and the help of each."""

import importlib

import pytest

from tfgpipe.commands import main as tfgpipe_main
from tools.bench import __main__ as bench
from tools.results import __main__ as results

PROGRAMS = {
    "tfgpipe": tfgpipe_main,
    "tools.bench": bench,
    "tools.results": results,
}
# Where their sub-commands are, and how they are called.
PACKAGES = {"tfgpipe": "tfgpipe.commands"}
CALLED = {"tfgpipe": "tfgpipe"}
COMMANDS = [
    (program, name)
    for program, module in PROGRAMS.items()
    for name in module.COMMANDS
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_lists_the_commands(program, word, capsys):
    assert PROGRAMS[program].main([program, word]) == 0
    shown = capsys.readouterr().out
    for name, what in PROGRAMS[program].COMMANDS.items():
        assert name in shown and what in shown


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_help_of_a_command_lists_its_flags(program, name, capsys):
    assert PROGRAMS[program].main([program, name, "--help"]) == 0
    shown = capsys.readouterr().out
    package = PACKAGES.get(program, program)
    module = importlib.import_module(f"{package}.{name}")
    assert module.__doc__ in shown
    called = CALLED.get(program, f"python -m {program}")
    assert f"Usage: {called} {name} [FLAGS]" in shown
    for flag in module.FLAGS:
        if flag not in ("h", "help"):
            assert f"{flag}:" in shown


def test_flags_of_all_modules_are_sorted_together(capsys):
    bench.main(["bench", "peers", "--help"])
    lines = capsys.readouterr().out.splitlines()
    found = [line.split(":")[0] for line in lines if line.startswith("  -")]
    names = [name.replace("[no]", "").split("-")[-1] for name in found]
    assert names == sorted(names)
    assert {"format", "rounds", "work"} <= set(names)
