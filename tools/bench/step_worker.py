"""Worker processes that are asked for one training step at a time.

A worker is a program that prints a line `READY {json}` when it has done some
steps, and then answers each line it reads by a line `T {json}`: "step" by the
seconds of one more training step, "mem" by the memory it takes; at "quit" it
ends. One accelerator is one thread. Linux only: /proc tells what the processes
and the machine do.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tools.bench.protocol import respond
from tools.report import progress, spread, spread_values

# A named tuple, of a module that runs it; see `command_of`.
Job = TypeVar("Job", bound=Hashable)

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_START_SECONDS = 600.0
_BUILDERS = 2  # processes that start at the same time
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Step(NamedTuple):
    """One training step.

    Attributes:
        seconds: How long it took.
        others: Share of the machine that other processes used meanwhile.
    """

    seconds: float
    others: float


class Worker:
    """A process and its answers.

    Args:
        command: Program and arguments.
        environment: Variables to set besides those of this process.
        is_pinned: Whether it may use one core only.

    Attributes:
        ready: What it said when it was ready, None if it never was.
        steps: The steps it has done.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        is_pinned: bool = False,
    ) -> None:
        self.ready: dict[str, Any] | None = None
        self.steps: list[Step] = []
        self._last_line = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, as it stays
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,  # so that its children end with it
        )
        if is_pinned:
            os.sched_setaffinity(
                self._process.pid, {max(os.sched_getaffinity(0))}
            )
        self._starting = threading.Thread(
            target=self._wait_until_ready, daemon=True
        )
        self._starting.start()

    def _wait_until_ready(self) -> None:
        for line in self._process.stdout:
            if line.startswith("READY "):
                self.ready = json.loads(line.removeprefix("READY "))
                return
            self._last_line = line.strip()

    @property
    def is_starting(self) -> bool:
        """Whether it is neither ready nor dead."""
        return self._starting.is_alive()

    def wait(self, seconds: float) -> bool:
        """Waits until it is ready; False if it does not get there."""
        self._starting.join(seconds)
        return self.ready is not None

    def why_not(self) -> str:
        """The last thing that a worker said that does not run."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else self._last_line or "it says nothing"

    def ask(self, question: str) -> dict[str, Any]:
        """Sends a line; returns the answer."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("T "):
                return json.loads(line.removeprefix("T "))
        raise RuntimeError(f"A worker ended: {self.why_not()}")

    def step(self) -> Step:
        """Does one training step."""
        pids = _descendants(self._process.pid)
        start, busy, own = time.monotonic(), _busy_ticks(), _ticks_of(pids)
        answer = self.ask("step")
        others = _busy_ticks() - busy - (_ticks_of(pids) - own)
        elapsed = (time.monotonic() - start) * _TICKS_PER_SECOND
        share = max(0.0, others / elapsed / (os.cpu_count() or 1))
        self.steps.append(Step(answer["s"], share))
        return self.steps[-1]

    def close(self) -> None:
        """Ends the process, if need be by force."""
        try:
            self._process.stdin.write("quit\n")
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        self.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def kill(self) -> None:
        """Ends the process at once, and its children, if there are any."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)


def in_turns(
    jobs: Sequence[Job],
    rounds: int,
    what: str,
    start: Callable[[Job], Worker] | None = None,
) -> dict[Job, Worker]:
    """Runs all jobs at the same time; they take turns, a step at a time.

    So that all of them see the same machine. All have ended afterwards, also
    after an error or Ctrl-C. `start` starts what is no module of a job.
    """
    workers: dict[Job, Worker] = {}
    try:
        for job in progress(dict.fromkeys(jobs), f"starting {what}"):
            while sum(w.is_starting for w in workers.values()) >= _BUILDERS:
                time.sleep(0.1)
            workers[job] = (
                Worker(command_of(job), _imports())
                if start is None
                else start(job)
            )
        for job, worker in workers.items():
            if not worker.wait(_START_SECONDS):
                raise RuntimeError(f"{job} does not run: {worker.why_not()}")
        # The first turn is not counted: nothing is in the caches yet.
        for turn in progress(range(rounds + 1), f"measuring {what}"):
            for worker in workers.values():
                worker.step()
                if turn == 0:
                    worker.steps.clear()
    finally:
        for worker in workers.values():
            worker.close()
    return workers


def _imports() -> dict[str, str]:
    """The environment in which a worker finds this package."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def command_of(job: Any) -> list[str]:
    """The module that the job comes from, as a program, with it in JSON."""
    module = type(job).__module__
    return [sys.executable, "-m", module, json.dumps(job._asdict())]


def answer(step: Callable[[], float]) -> None:
    """Does a first step, and then one whenever it is asked for one.

    Called by a worker.
    """
    respond({"first_step": step()}, {"step": lambda: {"s": step()}})


def timed_row(job: Job, workers: Mapping[Job, Worker]) -> dict[str, Any]:
    """Returns a job's fields, what its steps took, and what others took."""
    steps = workers[job].steps
    return {
        **job._asdict(),
        **spread_values("step_ms", spread([1000 * s.seconds for s in steps])),
        "others": statistics.median(step.others for step in steps),
    }


def median(steps: Sequence[Step]) -> float:
    """The median of the seconds."""
    return statistics.median(step.seconds for step in steps)


def _descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        with contextlib.suppress(OSError):
            for task in pathlib.Path(f"/proc/{found[-1]}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
    return found


def _busy_ticks() -> int:
    """Of all cores, since the start of the machine."""
    line = pathlib.Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _, _, *rest = map(int, line.split()[1:])
    return user + nice + system + sum(rest[:3])


def _ticks_of(pids: Iterable[int]) -> int:
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = pathlib.Path(f"/proc/{pid}/stat").read_text()
            fields = text.rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks
