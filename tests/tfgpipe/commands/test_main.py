"""The program `tfgpipe`: what its sub-commands print, write and return."""

import os
import pathlib
import subprocess
import sys

import keras
import pytest

import tfgpipe
from tfgpipe.__main__ import COMMANDS, main
from tfgpipe.commands import report
from tfgpipe.devices import local
from tfgpipe.profiles import Profile
from tfgpipe.schedules import SCHEDULES

SOURCE = """
import keras

class Shuffled(keras.layers.Layer):
    def call(self, x):
        return x + keras.ops.max(x)

def make_model():
    return [keras.Input((8,)), *[keras.layers.Dense(8) for _ in range(4)]]

def two_outputs():
    x = keras.Input((8,))
    y = keras.layers.Dense(8)(x)
    heads = [keras.layers.Dense(2, name=name) for name in "ab"]
    return keras.Model(x, {head.name: head(y) for head in heads})

def larger_than_this_computer():
    return [keras.Input((10**6,)), keras.layers.Dense(10**6)]

def with_values():
    dense = keras.layers.Dense(8)
    dense.build((None, 8))
    dense.bias.assign(dense.bias + 1)
    return [keras.Input((8,)), dense]

def mixed_rows():
    return [*make_model(), Shuffled(name="shuffled")]
"""


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A file with models, in the working directory."""
    path = tmp_path / "models_of_main.py"
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "split_cpu", lambda num_devices: None)
    return path


MODEL = "--model=models_of_main.py:make_model"


def run(*words):
    return main(["tfgpipe", *words])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name, capsys):
    assert run(name, "--help") == 0
    assert f"\n    tfgpipe {name} --" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan", "profile", "check"])
def test_flags_that_are_needed_are_named(name, capsys):
    assert run(name) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tfgpipe {name}: --model and --")
    assert "--help shows an example" in error


# ----------------------------------------------------------------------- plan
def test_plan_is_that_of_the_library_and_makes_the_model(capsys):
    flags = "--batch_size=64", "--num_devices=2", "--machine=v100"
    assert run("plan", MODEL, *flags, "--memory_gib=1") == 0
    table, call = capsys.readouterr().out.split("\n\n")
    layers = [keras.Input((8,)), *[keras.layers.Dense(8) for _ in range(4)]]
    expected = tfgpipe.plan(
        layers, 64, devices=2, machine="v100", memory_limit=2**30
    )
    assert table == str(expected)
    names = {"tfgpipe": tfgpipe, "layers": layers}
    exec(call, names)
    assert names["model"].num_partitions == expected.best.setting.num_partitions


@pytest.mark.parametrize("name", ["larger_than_this_computer", "with_values"])
def test_plan_allocates_no_weights_that_the_function_does_not_use(name):
    model = f"--model=models_of_main.py:{name}"
    flags = "--batch_size=8", "--num_devices=1", "--memory_gib=100000"
    assert run("plan", model, *flags, "--machine=v100") == 0


def test_plan_that_cannot_be_made_is_told(capsys):
    assert run("plan", MODEL, "--batch_size=8", "--machine=abacus") == 2
    assert "`machine` must be one of" in capsys.readouterr().err
    flags = "--batch_size=8", "--machine=v100", "--memory_gib=0.0000001"
    assert run("plan", MODEL, *flags) == 2
    assert "Use more devices" in capsys.readouterr().err


# -------------------------------------------------------------------- profile
def test_profile_is_written_and_planned_with(tmp_path, capsys):
    path = tmp_path / "profile.json"
    flags = "--batch_size=8", "--seconds=0.1"
    assert run("profile", MODEL, *flags, f"--output={path}") == 0
    assert f"Wrote {path}." in capsys.readouterr().out
    assert Profile.load(path).rows[-1] == 8
    flags = "--batch_size=8", "--num_devices=2", f"--profile={path}"
    assert run("plan", MODEL, *flags) == 0
    assert "seconds as measured" in capsys.readouterr().out


def test_profile_is_refused_before_it_is_measured(capsys):
    flags = "--batch_size=8", "--output=no/such/folder.json"
    assert run("profile", MODEL, *flags) == 2
    assert "in a folder that there is" in capsys.readouterr().err


# ---------------------------------------------------------------------- check
SMALL = "--num_partitions=2", "--num_micro_batches=2"


@pytest.mark.parametrize("name", ["make_model", "two_outputs"])
def test_check_of_exact_models_returns_0(name, capsys):
    model = f"--model=models_of_main.py:{name}"
    assert run("check", model, *SMALL) == 0
    out = capsys.readouterr().out
    assert "4 rows in 2 micro-batches" in out and "\nExact: " in out


@pytest.mark.filterwarnings("ignore:.*mix:UserWarning")
def test_check_that_finds_something_returns_1(capsys):
    assert run("check", "--model=models_of_main.py:mixed_rows", *SMALL) == 1
    out = capsys.readouterr().out
    assert "Not exact." in out and "shuffled" in out


# ------------------------------------------------------------------- timeline
def test_timeline_is_the_program_of_the_schedule(capsys):
    flags = "--schedule=1f1b", *SMALL, "--remat=never"
    assert run("timeline", *flags) == 0
    shown = tfgpipe.Schedule(capsys.readouterr().out)
    assert shown.tasks == SCHEDULES["1f1b"](2, 2, 1).tasks


def test_timeline_is_drawn(tmp_path, capsys):
    path = tmp_path / "timeline.png"
    assert run("timeline", *SMALL, f"--output={path}") == 0
    assert f"Wrote {path}." in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output=x.xyz"], "'xyz' is not supported"),
        (["--remat=x"], "must be one of"),
        (["--output=no/such.png"], "in a folder that there is"),
        (
            ["--schedule=zero_bubble_v", "--num_partitions=3"],
            "must be 2 times the number of devices",
        ),
        (["--schedule=x"], "should be one of"),
    ],
)
def test_timeline_that_there_is_not_is_told(flags, message, capsys):
    assert run("timeline", *flags) == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------- report
def test_report_has_a_page_and_goes_on(tmp_path, capsys, monkeypatch):
    parts = {
        "machine": report.PARTS["machine"],
        "speed": lambda devices: 1 / 0,
        "odd": lambda devices: {"MiB": [1.25, 2.0], "odd": "a|b"},
    }
    monkeypatch.setattr(report, "PARTS", parts)
    assert run("report") == 1
    page = (tmp_path / "report.md").read_text()
    assert page in capsys.readouterr().out
    assert f"| tfgpipe | {tfgpipe.__version__} |" in page
    assert "| failed | ZeroDivisionError: division by zero |" in page
    assert "| MiB | [1.25, 2.0] |\n| odd | a\\|b |" in page


@pytest.mark.slow
def test_report_measures_all_parts(tmp_path):
    """In a process of its own: operations are deterministic there."""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    environment["PYTHONPATH"] = str(pathlib.Path(tfgpipe.__file__).parents[1])
    command = [sys.executable, "-m", "tfgpipe", "report"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    page = (tmp_path / "report.md").read_text()
    assert all(f"## {name.capitalize()}" in page for name in report.PARTS)
    assert "| a step | as plain Keras |" in page
    rows = [line for line in page.splitlines() if ", remat=" in line]
    assert len(rows) > len(SCHEDULES)
    assert all(row.endswith("| the bits of one |") for row in rows)


# --------------------------------------------------------------------- worker
@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "*", "", "0"])
def test_worker_is_asked_for_all_addresses(bind, capsys):
    assert run("worker", f"--bind={bind}") == 2
    error = capsys.readouterr().err
    assert error.startswith("tfgpipe worker: --bind must be one address")
    assert "add --allow_any_host" in error


def test_secret_that_cannot_be_read_is_named(tmp_path, capsys):
    file = tmp_path / "secret"
    assert run("worker", f"--secret_file={file}") == 2
    error = capsys.readouterr().err
    assert error.startswith("tfgpipe worker: `secret_file` must be a file")
    assert str(file) in error
