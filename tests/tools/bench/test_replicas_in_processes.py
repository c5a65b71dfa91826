"""Replicas in worker processes."""

import json
import pathlib
import signal

import processes
import pytest

from tools.bench import replica_worker, step_worker


def test_replicas_in_processes_take_turns_with_one_process(monkeypatch, tables):
    jobs = []

    class Worker:
        """A second for each process."""

        is_starting = False
        ready = {"exchanged_mib": 2.0, "first_step": 3.0}  # noqa: RUF012

        def __init__(self, command, environment):
            self.job = replica_worker.Job(**json.loads(command[-1]))
            self.steps = []
            jobs.append(self.job)

        def wait(self, seconds):
            return True

        def step(self):
            seconds = float(self.job.processes)
            self.steps.append(step_worker.Step(seconds, others=0.0))

        def close(self):
            jobs.remove(self.job)

    monkeypatch.setattr(step_worker, "Worker", Worker)
    words = ["--part=processes", "--r=2", "--k=1,3", "--m=3", "--cell_ms=100"]
    found = tables("replicas", *words, "--processes=2,3")["processes"]
    shown = [(r["k"], r["processes"], r["more_ms"]) for r in found]
    # two devices, which three processes cannot share; and six
    assert shown == [
        (1, 1, 0),
        (1, 2, 1e3),
        (3, 1, 0),
        (3, 2, 1e3),
        (3, 3, 2e3),
    ]
    # 4 M - 1 tasks of the last cell, and 3 on the way to it and back
    assert found[0]["bound_ms"] == 1100
    assert found[3]["efficiency"] == pytest.approx((11 + 2 * 3) / 20)
    assert jobs == []


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [None, signal.SIGINT, signal.SIGKILL])
def test_processes_of_replicas_end_in_every_case(signal_, tmp_path):
    """When it is done, is interrupted, or killed."""
    words = "replicas --part=processes --r=2 --k=1 --m=2 --cell_ms=5".split()
    words += ["--rounds=3" if signal_ is None else "--rounds=1000000"]
    # A shell's background jobs, and what they start, ignore Ctrl-C.
    code = (
        "import signal, sys; from tools.bench import __main__ as bench; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(bench.main(['bench', *sys.argv[1:]]))"
    )
    run = processes.Process(
        tmp_path, "bench", "-c", code, *words, "--format=json"
    )
    children = set()

    def has_workers():
        children.update(step_worker._descendants(run.popen.pid))
        return sum("tools.worker" in command(pid) for pid in children) == 2

    try:
        processes.until(has_workers, run)
        if signal_ is not None:
            run.popen.send_signal(signal_)
        code = run.wait()
    finally:
        run.kill()
    assert code == {None: 0, signal.SIGINT: 130}.get(signal_, -9), run.output
    processes.until(lambda: not any(map(command, children)))
    if signal_ is None:
        shown = run.output[run.output.index("{") :]  # TensorFlow's notes first
        (table,) = json.loads(shown)["tables"]
        one, two = table["rows"]
        assert 0 < two["efficiency"] < 1 and 0 < one["efficiency"] < 1
        assert one["exchanged_mib"] == two["exchanged_mib"] > 0


def command(pid):
    """What a process runs; nothing once it has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
