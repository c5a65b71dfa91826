"""Each benchmark at a tiny size; what is measured in processes is made up."""

import os

import pytest
from keras import layers as kl

from tfgpipe.schedules import CHUNKS
from tools.bench import efficiency, plan, training_worker
from tools.bench.models import BenchModel
from tools.bench.waiting_layers import durations

pytestmark = pytest.mark.filterwarnings("ignore:.*side effects")
OVERHEAD = (
    "overhead --rounds=2 --model=transformer --dispatch_k=2 --dispatch_m=1,2"
)
# Words, and how many rows each table has.
REAL = {
    "schedules": (
        "efficiency --k=2 --m=k,1k --cell_ms=1 --schedule=gpipe --rounds=1",
        {"efficiency": 2},
    ),
    "step": (f"{OVERHEAD} --part=step", {"step": 1}),
    "dispatch": (f"{OVERHEAD} --part=dispatch", {"dispatch": 2}),
    "replicas": (
        "replicas --r=1,2 --k=2 --m=3 --cell_ms=1 --exchange_ms=1 --rounds=1",
        {"speed": 2},
    ),
}
QUICK = {"schedules", "dispatch"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in QUICK else pytest.mark.slow)
        for n in REAL
    ],
)
def test_command_makes_its_tables(name, tables):
    words, expected = REAL[name]
    found = tables(*words.split())
    assert {table: len(rows) for table, rows in found.items()} == expected
    for rows in found.values():
        for row in rows:
            numbers = [x for x in row.values() if isinstance(x, float)]
            assert all(x == x for x in numbers)
            assert all(
                row[k] > 0 for k in row if k.endswith(("step_ms", "ratio"))
            )


@pytest.mark.parametrize("name", efficiency.SCHEDULES)
def test_bound_of_uneven_cells_is_that_of_the_slowest_at_least(name):
    for cells, slowest in (("equal", 1), ("uneven", 2)):
        chunks = CHUNKS[name] or 2
        setting = efficiency.Setting(name, "never", cells, 1, 4, 32, chunks)
        work = 3 * 32 * slowest / chunks if chunks == 1 else 3 * 32
        length = setting.program().length(durations(setting.seconds()))
        assert length > work / 1000


# ------------------------------------------------- in processes that are none
def test_throughput_is_relative_to_one_cell(use_workers, tables, monkeypatch):
    """Four times faster with two cells and two micro-batches."""
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {0, 1}, raising=False
    )
    use_workers(training_worker.Job, lambda job: 0.1 / job.k / job.m)
    words = ["--model=transformer", "--k=1,2", "--m=2", "--rounds=2"]
    found = tables("throughput", *words)["throughput_transformer"]
    shown = [(r["k"], r["m"], r["speedup"], r["fraction"]) for r in found]
    assert shown == [(1, 1, 1, 1), (1, 2, 2, 2), (2, 2, 4, 3)]
    assert [r["speedup_same_m"] for r in found] == [1, 1, 2]


@pytest.mark.slow
def test_steps_are_beside_their_prediction(monkeypatch, tables):
    small = BenchModel(
        "four dense layers",
        lambda: [kl.Dense(8, "relu") for _ in range(4)],
        (8,),
        (8,),
        "mse",
        32,
    )
    monkeypatch.setattr(plan, "MODELS", {"small": small})
    monkeypatch.setattr(plan, "SETTINGS", plan.SETTINGS[-2:])
    words = "plan --table=steps --rounds=1 --seconds=0.2"
    rows = tables(*words.split())["steps"]
    assert [row["k"] for row in rows] == [2, 4]
    for row in rows:
        ratio = row["predicted_ms"] / row["measured_ms"]
        assert row["error"] == pytest.approx(ratio - 1, abs=1e-4)
