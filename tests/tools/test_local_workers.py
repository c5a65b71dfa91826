"""Workers on this machine start together, and end in every case."""

import subprocess
import sys

import pytest

from tools import local_workers


@pytest.fixture
def started(monkeypatch):
    """The processes, and what each of them does: wait."""
    made = []
    programs = [
        f"print('ready on port {port}', flush=True); time.sleep(600)"
        for port in (7, 8)
    ]

    def start(num_devices):
        code = f"import time; {programs[len(made)]}"
        command = [sys.executable, "-c", code]
        made.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        )
        return made[-1]

    monkeypatch.setattr(local_workers, "_started", start)
    return made, programs


def test_workers_end_after_an_error(started):
    made, _ = started
    with (
        pytest.raises(KeyboardInterrupt),
        local_workers.LocalWorkers(2, 3),
    ):
        raise KeyboardInterrupt
    assert all(process.poll() is not None for process in made)


def test_worker_that_does_not_start_ends_the_others(started):
    made, programs = started
    programs[1] = "raise SystemExit(9)"
    with pytest.raises(RuntimeError, match="Received: exit code 9 of"):
        local_workers.LocalWorkers(2, 3)
    assert all(process.poll() is not None for process in made)
