"""Each benchmark at a tiny size; what is measured in processes is made up."""

import os

import pytest
import tensorflow as tf
from keras import layers as kl

from tfgpipe.schedules import CHUNKS
from tools.bench import efficiency, plan_steps, replica_worker, training_worker
from tools.bench.models import BenchModel
from tools.bench.waiting_layers import durations

pytestmark = pytest.mark.filterwarnings("ignore:.*side effects")
OVERHEAD = (
    "overhead --rounds=2 --model=transformer --dispatch_k=2 --dispatch_m=1,2 "
    "--l=2 --k=1,2,3 --m=2"
)
# Words, and how many rows each table has.
REAL = {
    "schedules": (
        "efficiency --table=schedules --k=2 --m=k,1k --cell_ms=1 "
        "--schedule=gpipe --rounds=1",
        {"efficiency": 2},
    ),
    "shards": (
        "efficiency --table=shards --shards=1,2 --cell_ms=1 --rounds=1",
        {"shards": 2},
    ),
    "host": ("efficiency --table=host --cell_ms=1 --rounds=1", {"host": 4}),
    "timed": (
        "generate --k=2 --groups=1,2 --rows=1 --tokens=4 "
        "--cell_ms=1 --rounds=1",
        {"timed": 2},
    ),
    "step": (f"{OVERHEAD} --part=step", {"step": 1}),
    "dispatch": (f"{OVERHEAD} --part=dispatch", {"dispatch": 2}),
    "tracing": (f"{OVERHEAD} --part=tracing", {"tracing": 2}),
    "safety": (f"{OVERHEAD} --part=safety", {"safety": 2}),
    "replicas": (
        "replicas --r=1,2 --k=2 --m=3 --cell_ms=1 --exchange_ms=1 --rounds=1",
        {"speed": 2, "memory": 2},
    ),
    "loading": (
        "memory --table=loading --k=2 --preset_units=512 --preset_layers=2",
        {"loading": 2},
    ),
}
QUICK = {"schedules", "timed"}


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
@pytest.fixture
def _two_cores(monkeypatch):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {0, 1}, raising=False
    )
    yield
    on = {"disable_meta_optimizer": False}
    tf.config.optimizer.set_experimental_options(on)


@pytest.mark.usefixtures("_two_cores")
def test_throughput_is_relative_to_one_cell(use_workers, tables):
    """Four times faster with two cells and two micro-batches."""
    use_workers(training_worker.Job, lambda job: 0.1 / job.k / job.m)
    words = ["--model=transformer", "--k=1,2", "--m=2", "--rounds=2"]
    found = tables("throughput", *words)["throughput_transformer"]
    shown = [(r["k"], r["m"], r["speedup"], r["fraction"]) for r in found]
    assert shown == [(1, 1, 1, 1), (1, 2, 2, 2), (2, 2, 4, 3)]
    assert [r["speedup_same_m"] for r in found] == [1, 1, 2]


@pytest.mark.usefixtures("tiny")
def test_ways_to_recompute_are_compared_with_the_same_groups(
    use_workers, tables
):
    """With `tf.recompute_grad` all takes twice as much."""

    def factor(job):
        return (1 + ("recompute" in job.way)) / job.head_parts

    use_workers(
        training_worker.Job,
        lambda job: 0.1 * factor(job),
        lambda job: 10 * factor(job),
    )
    words = "--layers=4 --groups=2,4 --m=1,2 --rounds=2 --rules=never,0.4"
    found = tables("recompute", *words.split(), "--head_parts=1,2")
    rules = [(r["rule"], r["m"], r["time_ratio"]) for r in found["rules"]]
    assert rules == [("never", 2, 1), ("0.4", 2, 1)]
    heads = [(r["head_parts"], r["memory_ratio"]) for r in found["heads"]]
    assert heads == [(1, 1), (2, 0.5)]
    first, *rows = found["recompute"]
    assert first["way"] == "Keras, all kept" and "time_ratio" not in first
    ratios = [(r["groups"], r["m"], r["memory_ratio"]) for r in rows[:4]]
    assert ratios == [(2, 1, 1), (2, 1, 1), (2, 1, 0.5), (2, 2, 0.5)]


@pytest.mark.usefixtures("_two_cores")
def test_all_ways_to_recompute_train_alike():
    losses = []
    for way in ("keras", "recompute_grad", "gpipe"):
        job = training_worker.Job(
            "blocks", way, 2, groups=2, layers=3, width=4, sequence=3
        )
        model, x, y = training_worker.compiled(job)
        losses.append(model.fit(x, y, epochs=3, verbose=0).history["loss"])
    assert losses[0] == pytest.approx(losses[1], 1e-5)
    assert losses[0] == pytest.approx(losses[2], 1e-5)


@pytest.fixture
def replica_workers(use_workers):
    """A step takes a second for each process, and one for an unknown link."""
    use_workers(
        replica_worker.Job,
        lambda job: float(job.processes) + bool(job.link_ms and not job.share),
    )


def test_replicas_in_processes_take_turns_with_one(replica_workers, tables):
    words = "replicas --part=processes --r=2 --k=1,3 --m=3 --cell_ms=100"
    found = tables(*words.split(), "--processes=2,3")["processes"]
    shown = [(r["k"], r["processes"], r["more_ms"]) for r in found]
    # two devices, which three processes cannot share; and six
    expected = [(1, 1, 0), (1, 2, 1e3), (3, 1, 0), (3, 2, 1e3), (3, 3, 2e3)]
    assert shown == expected
    # 4 M - 1 tasks of the last cell, and 3 on the way to it and back
    assert found[0]["bound_ms"] == 1100
    assert found[3]["efficiency"] == pytest.approx((11 + 2 * 3) / 20)


def test_links_are_bounded_by_their_schedules(replica_workers, tables):
    words = "replicas --part=links --k=4 --m=20 --link_ms=50 --cell_ms=100"
    found = tables(*words.split())["links"]
    shown = [(r["schedule"], round(r["share"], 3), r["held"]) for r in found]
    assert shown == [
        *2 * [("gpipe", 0, 20)],
        *2 * [("1f1b", 0, 4)],
        ("1f1b", 0.167, 7),
        *2 * [("interleaved", 0, 8)],
        ("interleaved", 0.333, 17),
    ]
    # 3 (M + K - 1) tasks; the way there and back of 3 links
    assert [found[i]["bound_ms"] for i in (0, 1, 4)] == [6900, 7200, 7200]
    # A second more, of which 300 ms nothing hides; a link has 2 M transfers.
    assert found[2]["hidden"] is None
    assert found[1]["hidden"] == pytest.approx(1 - 0.7 / 2)
    assert found[4]["hidden"] == pytest.approx(1 + 0.3 / 2)


@pytest.mark.slow
def test_plan_is_beside_the_best_of_all_settings(monkeypatch, tables):
    small = BenchModel(
        "four dense layers",
        lambda: [kl.Dense(8, "relu") for _ in range(4)],
        (8,),
        (8,),
        "mse",
        32,
    )
    monkeypatch.setattr(plan_steps, "MODELS", {"small": small})
    monkeypatch.setattr(plan_steps, "MICRO_BATCHES", (1, 2))
    words = "plan --table=grid --rounds=1 --seconds=0.2"
    plan, best = tables(*words.split())["grid"]
    assert (plan["chosen_by"], best["chosen_by"]) == ("plan", "grid")
    assert best["ratio"] == 1.0 <= plan["ratio"]
    settings = [(s[4], s[1], s[3]) for s in plan["grid"]]
    assert len(settings) == len(set(settings)) == 2 * 5
