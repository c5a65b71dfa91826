"""The benchmarks' command: what it refuses, and what Ctrl-C leaves."""

import pytest

from tools import figures
from tools.bench import __main__ as bench
from tools.bench import efficiency

pytestmark = pytest.mark.usefixtures("tiny")


def run(*words):
    return bench.main(["bench", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "must be a sub-command: one of efficiency, throughput"),
        (["efficency"], "Did you mean 'efficiency'?"),
        (["--k=2"], "must be a sub-command"),
        (["efficiency", "fast"], "only flags. Received: ['fast']"),
        (["efficiency", "--round=3"], "Did you mean: rounds"),
        (["efficiency", "--rounds=0"], "not a positive integer"),
        (["efficiency", "--format=xml"], "should be one of <text|json|csv>"),
        (["efficiency", "--k=2,x"], "integers with commas"),
        (["efficiency", "--k=0"], "each at least 1. Received: '0'"),
        (["efficiency", "--cell_ms=-1"], "numbers with commas"),
        (["efficiency", "--m=4x"], "such as 4k"),
        (["efficiency", "--m=0"], "Received: '0'"),
        (["efficiency", "--schedule=1f2b"], "of which unknown: ['1f2b']"),
        (["throughput", "--k=4096"], "at most the number of cores"),
        (["throughput", "--k=1", "--m=9"], "at most --batch_size, 8"),
        (["overhead", "--dispatch_m=4"], "two numbers or more"),
    ],
)
def test_bad_flags_fail_before_any_work(words, message, capsys):
    words = [*words, "--model=transformer"] if "throughput" in words else words
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_table_is_written_for_pages(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(efficiency, "measure", lambda *_: (1.0, [0.1]))
    words = ["efficiency", "--k=2", "--m=2", "--schedule=gpipe", "--cell_ms=1"]
    assert run(*words, "--cells=equal", "--figure=steps") == 0
    figure = figures.read("steps")
    (row,) = figure["rows"]
    shown = dict(zip(figure["columns"], row))
    assert (shown["schedule"], shown["step ms"]) == ("gpipe", "100.0")
    assert figure["command"].endswith("--cell_ms=1 --cells=equal")
    assert figure["machine"] and "keras" in figure["versions"]


def test_interrupted_run_prints_what_it_has(monkeypatch, capsys):
    def measure(setting, rounds):
        if setting.m > 1:
            raise KeyboardInterrupt
        return 1.0, [0.1] * rounds

    monkeypatch.setattr(efficiency, "measure", measure)
    words = ["--k=2", "--m=1,2", "--schedule=gpipe", "--cells=equal"]
    assert run("efficiency", "--cell_ms=1", *words) == 130
    captured = capsys.readouterr()
    assert "gpipe" in captured.out
    assert "interrupted" in captured.err
