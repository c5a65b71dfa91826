"""Processes that run cases: one that crashes or hangs is a finding, too.

A process is replaced after some cases, since TensorFlow keeps every graph, and
as soon as it takes too long.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from multiprocessing import connection
from typing import Any

from case import Case
from outcome import Outcome

CASES_EACH = 40
LIMIT = 300.0  # seconds for a case
HANGS = Outcome("failed", f"hangs: over {LIMIT:.0f} s")
Job = tuple[int, Case]


def _serve(pipe: Any) -> None:
    """Runs what comes through a pipe."""
    import compare  # starts TensorFlow, which the parent does not need to

    while True:
        case = pipe.recv()
        if case is None:
            return
        start = time.process_time()
        found = compare.run(case)
        pipe.send((found, time.process_time() - start))


class Worker:
    """A process, and the case that it runs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,))
        self.process.start()
        other.close()
        self.job: Job | None = None
        self.count, self.deadline = 0, 0.0

    def send(self, job: Job) -> None:
        self.job, self.count = job, self.count + 1
        self.deadline = time.monotonic() + LIMIT
        self.pipe.send(job[1])

    def receive(self) -> tuple[Outcome, float]:
        """What became of the case, and its CPU seconds."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            reason = f"the process died: {self.process.exitcode}"
            return Outcome("failed", reason, reason), 0.0

    @property
    def is_late(self) -> bool:
        return self.job is not None and time.monotonic() > self.deadline

    @property
    def is_worn(self) -> bool:
        return self.count >= CASES_EACH or not self.process.is_alive()

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def run_all(
    jobs: Iterable[Job], num_workers: int
) -> Iterator[tuple[Job, Outcome, float]]:
    """Runs cases in processes; yields them as they end.

    Args:
        jobs: Cases with their numbers; more may be added while they run.
        num_workers: How many processes.
    """
    waiting = iter(jobs)
    busy: list[Worker] = []
    idle: list[Worker] = []
    try:
        while True:
            while len(busy) < num_workers:
                job = next(waiting, None)
                if job is None:
                    break
                worker = idle.pop() if idle else Worker()
                worker.send(job)
                busy.append(worker)
            if not busy:
                return
            ready = connection.wait([w.pipe for w in busy], timeout=1.0)
            for worker in list(busy):
                if worker.pipe in ready:
                    found = worker.receive()
                elif worker.is_late:
                    worker.stop()
                    found = HANGS, LIMIT
                else:
                    continue
                busy.remove(worker)
                job, worker.job = worker.job, None
                if worker.is_worn:
                    worker.stop() if worker.process.is_alive() else None
                else:
                    idle.append(worker)
                yield job, *found
    finally:
        for worker in [*busy, *idle]:
            worker.stop()
