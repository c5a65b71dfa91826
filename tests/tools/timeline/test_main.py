"""The timeline command: what it draws, prints and refuses."""

import json
import re

import keras
import numpy as np
import pytest
from simulated import seconds

from params import datasets, registry
from params.experiment import Experiment
from params.images import Images
from params.optimizer import Optimizer
from tfgpipe import timeline as library
from tfgpipe.devices import local
from tfgpipe.schedules import SCHEDULES
from tfgpipe.timeline import Event, simulated
from tools.bench import efficiency
from tools.timeline import __main__ as timeline


class Perceptron:
    def layers(self):
        return [
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(3, "softmax", name="classes"),
        ]


@pytest.fixture
def measured(monkeypatch):
    """A tiny experiment; steps take half as long again as they should."""
    calls = []

    def measure(model, x, y, **kwargs):
        calls.append((model, np.shape(x), np.shape(y)))
        program = SCHEDULES["1f1b"](2, model.num_micro_batches).program()
        made = simulated(program, lambda op: seconds(op) / 100)
        return [Event(t, d, 1.5 * a, 0.5 * a + b) for t, d, a, b in made]

    monkeypatch.setattr(library, "measure", measure, raising=False)
    monkeypatch.setattr(efficiency, "make_devices", lambda *_: None)
    monkeypatch.setattr(local, "split_cpu", lambda num_devices: None)
    x = np.zeros((6, 4, 4, 1), np.float32)
    y = np.zeros(6, np.int32)
    data = datasets.ImageDataset(x, y, x, y)
    monkeypatch.setitem(datasets.LOADERS, "zeros", lambda: data)
    experiment = Experiment(
        name="image.tiny",
        description="two layers",
        model=Perceptron(),
        data=Images("zeros"),
        optimizer=Optimizer("sgd", 0.1),
        batch_size=6,
        epochs=1,
        num_partitions=2,
        num_micro_batches=3,
    )
    monkeypatch.setitem(registry._EXPERIMENTS, experiment.name, experiment)
    return calls


def run(*words):
    return timeline.main(["timeline", *words])


def test_simulation_prints_tasks_and_writes_three_files(tmp_path, capsys):
    output = tmp_path / "new" / "one"
    assert run("--simulate", "--k=2", "--m=3", f"--output={output}") == 0
    out = capsys.readouterr().out
    assert "gpipe: K = 2, M = 3, remat except_last" in out
    assert "cells of 20 ms, simulated: bubble 21.4%" in out
    assert "\ndevice 1 " in out and "# F forward, R recompute" in out
    for end in ("png", "svg", "json"):
        path = output.with_suffix(f".{end}")
        assert path.stat().st_size and str(path) in out
    trace = json.loads(output.with_suffix(".json").read_text())
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 16


def test_json_has_the_measured_and_the_ideal_numbers(measured, capsys):
    words = "--k=2 --m=4 --schedule=1f1b --remat=never --output="
    assert run(*words.split(), "--forward_ms=10", "--format=json") == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    (step,), tasks = (table["rows"] for table in tables)
    # The last task starts 1.5 times too late.
    assert step["ideal_ms"] == pytest.approx(150)
    assert step["length_ms"] == pytest.approx(1.5 * 130 + 20)
    assert step["ideal_bubble"] == pytest.approx(0.2)
    assert step["bubble"] == pytest.approx(1 - 120 / 215, rel=1e-5)
    assert step["ratio"] == pytest.approx(215 / 150, rel=1e-5)
    assert [row["count"] for row in tasks] == [8, 8]
    ((model, x, y),) = measured
    assert (model.num_partitions, x, y) == (2, (4, 1), (4, 1))


def test_experiment_is_measured_on_one_mini_batch(measured, capsys):
    words = "--params=image.tiny --m=2 --set=batch_size=4 --output="
    assert run(*words.split()) == 0
    out = capsys.readouterr().out
    assert "gpipe: K = 2, M = 2" in out
    assert re.search(r"image.tiny: bubble \S+% measured, \S+% ideal;", out)
    ((model, x, y),) = measured
    assert (model.num_micro_batches, x, y) == (2, (4, 4, 4, 1), (4,))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--k=0", "--k=0"),
        ("--k=two", "--k=two"),
        ("--forward_ms=0", "--forward_ms=0"),
        ("--schedule=gpip", "<gpipe|1f1b|interleaved|breadth_first|"),
        ("--remat=maybe", "<except_last|always|never|offload>"),
        ("--format=xml", "<text|json|csv>"),
        ("--chunks=2", "Unknown command line flag 'chunks'"),
        ("--num_chunks=2", "must be 1 unless --schedule=interleaved"),
        ("k=2", "only flags. Received: ['k=2']"),
        ("--set=epochs=1", "it needs --params"),
        ("--params=image.tinny", "Did you mean 'image.tiny'"),
        ("--params=image.tiny --k=3", "num_partitions=3"),
        ("--params=image.tiny --m=7", "at most `batch_size`"),
        ("--params=image.tiny --simulate", "must not be given both"),
        ("--params=image.tiny --forward_ms=2", "--forward_ms and --params"),
        ("--simulate --output=/dev/null/a", "--output=/dev/null/a, which"),
    ],
)
def test_bad_flags_are_refused(words, message, measured, tmp_path, capsys):
    folder = tmp_path / "new"
    assert run(f"--output={folder}/", *words.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("tools.timeline: ")
    assert captured.out == ""
    assert not measured and not folder.exists()
