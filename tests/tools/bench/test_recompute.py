"""Recomputation beside that of TensorFlow."""

import io
import json

import pytest
import tensorflow as tf

from tools.bench import __main__ as bench
from tools.bench import recompute_worker, step_worker
from tools.bench.recompute_worker import Job

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(autouse=True)
def _graph_optimiser():
    yield
    on = {"disable_meta_optimizer": False}
    tf.config.optimizer.set_experimental_options(on)


def test_ways_are_compared_with_the_same_groups(use_workers, tables):
    """With `tf.recompute_grad` all takes twice as much."""

    def factor(job):
        return 1 + ("recompute" in job.way)

    use_workers(
        Job, lambda job: 0.1 * factor(job), lambda job: 10 * factor(job)
    )
    words = ["--layers=4", "--groups=2,4", "--m=1,2", "--rounds=2"]
    found = tables("recompute", *words, "--rules=never,0.4")
    assert [(r["rule"], r["m"], r["time_ratio"]) for r in found["rules"]] == [
        ("never", 2, 1),
        ("0.4", 2, 1),
    ]
    rows = found["recompute"]
    assert [(r["way"], r["groups"], r["m"]) for r in rows] == [
        ("Keras, all kept", 1, 1),
        ("recompute_grad", 2, 1),
        ("recompute_grad, as written", 2, 1),
        ("gpipe", 2, 1),
        ("gpipe", 2, 2),
        ("recompute_grad", 4, 1),
        ("recompute_grad, as written", 4, 1),
        ("gpipe", 4, 1),
        ("gpipe", 4, 2),
    ]
    assert "time_ratio" not in rows[0]
    ratios = [(r["time_ratio"], r["memory_ratio"]) for r in rows[1:5]]
    assert ratios == [(1, 1), (1, 1), (0.5, 0.5), (0.5, 0.5)]


def test_heads_in_parts_are_compared_with_whole_ones(use_workers, tables):
    use_workers(
        Job, lambda job: 0.1, lambda job: (10 + job.words) / job.head_parts
    )
    words = ["--table=heads", "--head_parts=1,2", "--words=90", "--rounds=2"]
    [rows] = tables("recompute", *words).values()
    found = [(r["head_parts"], r["memory_ratio"], r["layers"]) for r in rows]
    assert found == [(1, 1, 2), (2, 0.5, 2)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--groups=3", "--layers=2"], "at most --layers, 2"),
        (["--m=3", "--batch_size=2"], "at most --batch_size, 2"),
        (["--rules=never,2"], "--rules: `remat` must be one of"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, message, capsys):
    assert bench.main(["bench", "recompute", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("way", "m"),
    [
        pytest.param("keras", 1, marks=pytest.mark.slow),
        pytest.param("recompute_grad", 1, marks=pytest.mark.slow),
        ("gpipe", 2),
    ],
)
def test_worker_steps_and_measures_when_asked(way, m, monkeypatch, capsys):
    job = Job(way, 2, m, 2, 4, 3, 2)
    monkeypatch.setattr("sys.stdin", io.StringIO("step\nmem\nquit\nstep\n"))
    recompute_worker.main(["worker", step_worker.command_of(job)[-1]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["READY", "T", "T"]
    assert json.loads(lines[-1][2:])["mib"] >= 0


def test_all_ways_compute_the_same():
    losses = []
    for way in ("keras", "recompute_grad", "gpipe"):
        job = Job(way, 2, 1, 3, 4, 3, 2)
        model, (x, y) = (
            recompute_worker.compiled(job),
            recompute_worker.data(job),
        )
        losses.append(model.fit(x, y, epochs=3, verbose=0).history["loss"])
    assert losses[0] == pytest.approx(losses[1], 1e-5)
    assert losses[0] == pytest.approx(losses[2], 1e-5)
