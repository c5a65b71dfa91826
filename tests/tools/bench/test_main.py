"""The benchmarks' command, at a tiny size: tables, and what it refuses.

No test says anything about how long something takes.
"""

import copy
import dataclasses
import json
import os

import keras
import pytest

from tfgpipe.devices import local
from tools import figures
from tools.bench import __main__ as bench
from tools.bench import efficiency, gpu, models, overhead, table1
from tools.bench import replicas as bench_replicas
from tools.bench.case_worker import Case
from tools.bench.cases import Results, run_cases
from tools.bench.models import BenchModel

TINY = BenchModel(
    "two layers",
    lambda: [keras.layers.Dense(3, "relu"), keras.layers.Dense(2)],
    (4,),
    (2,),
    "mse",
    8,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A tiny model; leaves the tests' devices and cores alone."""
    monkeypatch.setitem(models.MODELS, "transformer", TINY)
    monkeypatch.setattr(overhead, "BESIDE", ["transformer"])
    monkeypatch.setattr(overhead, "DISPATCH_M", [1, 2])
    monkeypatch.setattr(overhead, "DISPATCH_K", 2)
    for module in (efficiency, overhead, bench_replicas):
        monkeypatch.setattr(module, "make_devices", lambda *_: None)
    monkeypatch.setattr(local, "split_cpu", lambda num_devices: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)


def run(*words):
    return bench.main(["bench", *words])


def tables(capsys, *words):
    """The rows of each table that a command prints as JSON."""
    assert run(*words, "--format=json") == 0
    made = json.loads(capsys.readouterr().out)["tables"]
    return {table["name"]: table["rows"] for table in made}


# Words, the table, and how many rows it has.
TABLES = [
    (
        "efficiency --k=2 --m=k,1k --cell_ms=1 --schedule=gpipe --rounds=1",
        "efficiency",
        2,
    ),
    ("overhead --rounds=2 --part=dispatch", "dispatch", 2),
    ("overhead --rounds=2 --part=step", "step", 1),
    ("replicas --r=1,2 --k=2 --m=3 --rounds=1", "speed", 2),
]


@pytest.mark.filterwarnings("ignore:.*side effects")
@pytest.mark.parametrize(
    ("words", "name", "count"),
    [
        TABLES[0],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in TABLES[1:]),
    ],
)
def test_command_makes_its_table(words, name, count, capsys):
    ((found, rows),) = tables(capsys, *words.split()).items()
    assert (found, len(rows)) == (name, count)
    for row in rows:
        assert all(row[k] > 0 for k in row if k.endswith(("step_ms", "ratio")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "must be a sub-command: one of efficiency, throughput"),
        ("efficiency --format=xml", "should be one of <text|json>"),
        ("efficiency --k=2,x", "integers with commas"),
        ("efficiency --cell_ms=-1", "numbers with commas"),
        ("efficiency --m=4x", "such as 4k"),
        ("efficiency --schedule=1f2b", "of which unknown: ['1f2b']"),
        ("throughput --k=4096", "at most the number of cores"),
        ("memory --schedule=interleaved", "number of cells, 8"),
    ],
)
def test_bad_flags_fail_before_any_work(words, message, capsys):
    assert run(*words.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_table_is_written_for_pages(monkeypatch, tmp_path):
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


# ------------------------------------------------------- cases on other devices
@pytest.mark.slow
def test_cases_are_trained_once_and_alike(tmp_path):
    small = {"rows": 8, "is_small": True, "rounds": 1, "steps": 1}
    pipeline = Case("lm.transformer_3_small", k=2, m=4, **small)
    plain = dataclasses.replace(pipeline, library="keras", k=1, m=1)
    path = tmp_path / "results.jsonl"
    run_cases([pipeline], Results(path), num_processes=1)
    with path.open("a") as file:
        file.write('{"case": {"model"')  # the machine was taken away
    results = Results(path)
    run_cases([plain, pipeline], results, num_processes=2)
    assert len(results.lines) == 2
    expected, found = map(results.result_of, (plain, pipeline))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert len(found["plan_mib"]) == 2 and found["step_s"] > 0


@pytest.mark.parametrize(
    ("module", "flag", "count"),
    [(gpu, "--part=whole", 8), (gpu, "--part=split", 9), (table1, "--gpu", 8)],
)
def test_table_is_printed_from_the_file_alone(
    module, flag, count, tmp_path, capsys
):
    path = tmp_path / "results.jsonl"
    name = module.__name__.rpartition(".")[2]
    words = ["bench", name, flag, f"--output={path}", "--table"]
    values = copy.deepcopy(module.FLAGS)
    values(words[1:])
    results = Results(path)
    measured = {"step_s": 0.5, "mib": [2048], "plan_mib": [1024]}
    for case in module.list_cases(values):
        results.add(case, {**measured, "card": "H200"})
    assert bench.main(words) == 0
    _, (title, _, *lines) = (
        part.splitlines() for part in capsys.readouterr().out.split("\n\n", 1)
    )
    assert title.startswith("H200") and len(lines) == 2 + count
