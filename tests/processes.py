"""Workers and controllers in processes of their own, for tests."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
LIMIT = 120  # seconds that anything may take on a busy machine


class Process:
    """A Python program; its output is collected in a file.

    `inside` is what runs it, such as in a network namespace, and `cwd` where.
    """

    def __init__(
        self, folder, name, *arguments, inside=(), cwd=ROOT, **environment
    ):
        self.path = folder / f"{name}.{time.monotonic_ns()}.txt"
        path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        with self.path.open("w") as out:
            self.popen = subprocess.Popen(
                [*inside, sys.executable, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                preexec_fn=_handle_signals,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "PYTHONUNBUFFERED": "1",
                    **environment,
                },
            )

    @property
    def output(self):
        return self.path.read_text()

    def wait(self):
        """The exit code."""
        return self.popen.wait(LIMIT)

    def ends_within(self, seconds):
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self):
        """What `kill -9` does."""
        self.popen.kill()
        self.popen.wait()


def _handle_signals():
    """As in a process of a terminal, also where the tests ignore some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def until(condition, *processes):
    """Waits for what the condition returns; the processes must go on."""
    end = time.monotonic() + LIMIT
    while not (found := condition()):
        for process in processes:
            assert process.popen.poll() is None, process.output
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


class Workers:
    """Workers with two devices each."""

    def __init__(self, folder, count):
        self._folder = folder
        self._running = [self._started(0) for _ in range(count)]
        self.ports = [until(lambda w=w: port(w), w) for w in self._running]

    def _started(self, number):
        flags = f"--port={number}", "--num_virtual_devices=2"
        command = "-m", "tfgpipe", "worker", *flags
        return Process(self._folder, "worker", *command)

    @property
    def flag(self):
        addresses = [f"127.0.0.1:{number}" for number in self.ports]
        return "--workers=" + ",".join(addresses)

    def output(self, index):
        return self._running[index].output

    def kill(self, index):
        self._running[index].kill()

    def pid(self, index):
        return self._running[index].popen.pid

    def stop(self, index):
        """It does nothing any more, and stays."""
        self._running[index].popen.send_signal(signal.SIGSTOP)

    def restart(self, index):
        self._running[index] = self._started(self.ports[index])

    def end(self):
        for worker in self._running:
            worker.kill()


def port(worker):
    found = re.search(r"ready on port (\d+)", worker.output)
    return found and int(found[1])


def train(folder, *flags, **environment):
    """The command, with tiny experiments besides those that there are."""
    program = str(ROOT / "tests" / "tiny_train.py")
    flags = ["--params=image.tiny", *flags]
    return Process(folder, "train", program, *flags, **environment)
