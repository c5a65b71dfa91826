"""Speed-up of real models."""

import io
import os

import pytest

from tools.bench import step_worker, throughput_worker

pytestmark = pytest.mark.usefixtures("tiny")


def test_throughput_is_relative_to_one_cell(monkeypatch, use_workers, tables):
    """Four times faster with two cells and two micro-batches."""
    use_workers(throughput_worker.Job, lambda job: 0.1 / job.k / job.m)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {0, 1}, raising=False
    )
    words = ["--model=transformer", "--k=1,2", "--m=2", "--rounds=2"]
    found = tables("throughput", *words)["throughput_transformer"]
    shown = [(r["k"], r["m"], r["speedup"], r["fraction"]) for r in found]
    assert shown == [(1, 1, 1, 1), (1, 2, 2, 2), (2, 2, 4, 3)]
    assert [r["speedup_same_m"] for r in found] == [1, 1, 2]


def test_throughput_worker_steps_when_asked(monkeypatch, capsys):
    job = throughput_worker.Job("transformer", "gpipe", "always", 2, 2, 1, 4)
    monkeypatch.setattr("sys.stdin", io.StringIO("step\nstep\nquit\nstep\n"))
    throughput_worker.main(["worker", step_worker.command_of(job)[-1]])
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["READY", "T", "T"]
