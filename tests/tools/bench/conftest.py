"""Benchmarks at a tiny size.

No test says anything about how long something takes.
"""

import json
import os

import keras
import pytest

from tfgpipe.devices import local
from tools.bench import __main__ as bench
from tools.bench import efficiency, models, replicas, step_worker
from tools.bench import overhead as bench_overhead
from tools.bench.models import BenchModel

TINY = BenchModel(
    "two layers",
    lambda: [keras.layers.Dense(3, "relu"), keras.layers.Dense(2)],
    (4,),
    (2,),
    "mse",
    8,
)


@pytest.fixture
def tiny(monkeypatch):
    """A tiny model; leaves the tests' devices and cores alone."""
    monkeypatch.setitem(models.MODELS, "transformer", TINY)
    monkeypatch.setattr(efficiency, "make_devices", lambda *_: None)
    monkeypatch.setattr(bench_overhead, "make_devices", lambda *_: None)
    monkeypatch.setattr(replicas, "make_devices", lambda *_: None)
    monkeypatch.setattr(local, "split_cpu", lambda num_devices: None)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: None, raising=False
    )


@pytest.fixture
def tables(tiny, capsys):
    """The rows of each table that a command prints as JSON."""

    def tables(*words):
        assert bench.main(["bench", *words, "--format=json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["command"] == words[0]
        return {table["name"]: table["rows"] for table in made["tables"]}

    return tables


@pytest.fixture
def use_workers(monkeypatch):
    """A function that has workers be none, until all of them are closed.

    It takes the class of their jobs, and what tells of a job the seconds of a
    step.
    """
    running = []

    def use(job_class, seconds):
        class Worker:
            is_starting = False

            def __init__(self, command, environment):
                self.job = job_class(**json.loads(command[-1]))
                self.steps = []
                running.append(self)

            def wait(self, limit):
                return True

            def step(self):
                took = seconds(self.job)
                self.steps.append(step_worker.Step(took, others=0.0))

            def close(self):
                running.remove(self)

        monkeypatch.setattr(step_worker, "Worker", Worker)

    yield use
    assert not running
