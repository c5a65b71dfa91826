"""One table of exit codes, and what gives each at every phase."""

import errno
import pathlib
import re
import signal
import sys
import time

import pytest
import runs
from absl import flags
from absl.testing import flagsaver
from processes import ROOT, Process, train, until

from tfgpipe.hosts import link
from tools.train import command
from tools.train.ends import Code
from tools.train.trainer import Trainer

SIGNALS = [
    (signal.SIGTERM, 75),
    (signal.SIGHUP, 75),
    (signal.SIGINT, 76),
]


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)


def run(monkeypatch, train_dir, **given):
    words = ["train", f"--train_dir={train_dir}"] if train_dir else ["train"]
    monkeypatch.setattr(sys, "argv", words)
    flags.FLAGS.mark_as_parsed()
    folder = str(train_dir) if train_dir else None
    given = {"params": "image.tiny", "steps": 2, "train_dir": folder, **given}
    with flagsaver.flagsaver(**given):
        return command.program(["train"])


def test_table_is_that_of_the_documentation():
    text = (ROOT / "docs" / "long_runs.md").read_text()
    told = {int(code) for code in re.findall(r"^\| (\d+) \| ", text, re.M)}
    assert told == set(Code)
    assert Code.LOST == link.LOST


@pytest.mark.parametrize("phase", ["fit", "export"])
def test_full_disk_has_its_code(phase, tmp_path, monkeypatch, capsys):
    """It was 1, which is that of weights that differ."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, phase, full)
    assert run(monkeypatch, tmp_path) == 74
    told = capsys.readouterr().err
    assert "No space left" in told and "The same command goes on" in told


def test_error_that_nobody_has_foreseen_has_its_code(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(Trainer, "evaluate", broken)
    assert run(monkeypatch, None) == 70
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_signal_during_imports_has_its_code(tmp_path):
    """Those of TensorFlow swallow what is raised in them, now and then."""
    program = "import runpy; runpy.run_module('tools.train', None, '__main__')"
    mark = "import sys; sys.path.insert(0, '.');" + (
        "from tools.train import ends; catch = ends.catch_signals;"
        "ends.catch_signals = lambda: (catch(), print('caught', flush=True));"
    )
    run = Process(tmp_path, "train", "-c", mark + program)
    until(lambda: "caught" in run.output, run)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.output


@pytest.mark.slow
@pytest.mark.parametrize("phase", [*runs.PHASES])
@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_program_ends_with_the_code_in_each_phase(
    tmp_path, phase, number, code
):
    flags = "--steps=4", f"--train_dir={tmp_path / 'run'}"
    run = train(tmp_path, *flags, TINY_STOP=f"{phase}:{int(number)}")
    start = time.monotonic()
    assert run.wait() == code, run.output
    assert time.monotonic() - start < 60  # a second one waits for no disk
    again = train(tmp_path, *flags)
    assert again.wait() == 0, again.output
    assert pathlib.Path(tmp_path / "run" / "final.keras").is_file()
