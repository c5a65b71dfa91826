"""Cases that are trained in processes of their own, and a file of results.

Several processes start, trace and compile at the same time; what is timed is
timed in one of them at a time. A result is a line of JSON in a file: a case
that is there is not run again, so that what was interrupted goes on.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from tools.bench.case_worker import NO_MEMORY, Case
from tools.bench.memory_worker import EXACT_MEMORY
from tools.bench.step_worker import Worker

_SECONDS = 600.0  # that a case may take
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Results:
    """A file of results, a line of JSON each.

    Args:
        path: Of the file, which need not exist.

    Attributes:
        lines: The results, in order: `{"case": {...}, ...}`.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        *whole, self._cut_off = text.split("\n")
        self.lines: list[dict[str, Any]] = [
            json.loads(line) for line in whole if line.endswith("}")
        ]

    def add(self, case: Case, result: dict[str, Any]) -> None:
        """Appends a line."""
        self.lines.append({"case": dataclasses.asdict(case), **result})
        with self._path.open("a") as file:
            if self._cut_off:  # a line that has no end
                file.write("\n")
                self._cut_off = ""
            file.write(json.dumps(self.lines[-1]) + "\n")

    def result_of(self, case: Case) -> dict[str, Any] | None:
        """Returns the result of a case, None without one."""
        wanted = dataclasses.asdict(case)
        found = [line for line in self.lines if line["case"] == wanted]
        return found[-1] if found else None


class _Run:
    """Threads that each run one case after the other."""

    def __init__(self, cases: Sequence[Case], results: Results) -> None:
        self._waiting = collections.deque(cases)
        self._results = results
        self._lock = threading.Lock()  # of all that is below
        self._workers: set[Worker] = set()
        self._crowded: set[Worker] = set()  # were not always alone
        self._again: list[Case] = []
        self._is_over = False
        self._timing = threading.Lock()

    def run(self, num_processes: int) -> None:
        """Runs cases, so many at a time, then alone what did not fit."""
        threads = [
            threading.Thread(target=self._work) for _ in range(num_processes)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._waiting.extend(self._again)
            self._work()
        finally:  # also after Ctrl-C
            with self._lock:
                self._is_over = True
                for worker in self._workers:
                    worker.kill()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._is_over or not self._waiting:
                    return
                case = self._waiting.popleft()
                worker = _started(case)
                self._workers.add(worker)
                if len(self._workers) > 1:
                    self._crowded |= self._workers
            started = time.monotonic()
            result = _result(worker, self._timing)
            result["wall_s"] = round(time.monotonic() - started, 1)
            with self._lock:
                self._workers.discard(worker)
                if self._is_over:
                    return
                print(f"{case.model}: {case.name}: {result}", file=sys.stderr)
                if result.get("error") == NO_MEMORY and worker in self._crowded:
                    self._again.append(case)
                else:
                    self._results.add(case, result)


def run_cases(
    cases: Sequence[Case],
    results: Results,
    num_processes: int,
) -> None:
    """Runs the cases that have no result yet, in their order.

    What does not fit into the memory beside others is run again, alone.
    """
    missing = [case for case in cases if results.result_of(case) is None]
    _Run(missing, results).run(num_processes)


def _started(case: Case) -> Worker:
    python = sys.executable
    environment = {"PYTHONPATH": str(_ROOT)}
    if case.library == "jax":
        python = os.environ.get("JAX_PY", python)
        environment["KERAS_BACKEND"] = "jax"
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        flag = f"--xla_force_host_platform_device_count={case.k}"
        environment["XLA_FLAGS"] = flag
    if case.is_exact:
        environment |= EXACT_MEMORY
    words = ["-m", "tools.bench.case_worker"]
    words.append(json.dumps(dataclasses.asdict(case)))
    return Worker([python, *words], environment)


def _result(worker: Worker, timing: threading.Lock) -> dict[str, Any]:
    """Has a worker measure when it is its turn; ends it."""
    timer = threading.Timer(_SECONDS, worker.kill)
    timer.start()
    try:
        if not worker.wait(_SECONDS):
            return {"error": worker.why_not()}
        result = dict(worker.ready or {})
        if "error" not in result:
            with timing:
                result |= worker.ask("time")
        if "error" not in result:
            result |= worker.ask("plan")
        return result
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        timer.cancel()
        worker.close()
