"""Accelerators that are processes with a limit on their memory.

The limit is `RLIMIT_DATA`: Linux counts the private memory that a process can
write to (heap and anonymous mappings), and refuses more. It needs no rights,
unlike a control group, and leaves out what is only reserved or belongs to
files, unlike `RLIMIT_AS`. TensorFlow then ends the process, or reports that a
tensor could not be allocated.

The processes are forked from a server that has imported TensorFlow already, and
so take no time to start. glibc gives every tensor of more than 64 KiB a mapping
of its own, so that what is in memory is what is in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import socket
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

# To be set before a process starts.
EXACT_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "10000000",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # its allocator keeps what it has had
}
_ENVIRONMENT = {
    **EXACT_MEMORY,
    "CUDA_VISIBLE_DEVICES": "",
    "OPENBLAS_NUM_THREADS": "1",  # a process with threads cannot be forked
    "TF_CPP_MIN_LOG_LEVEL": "1",  # warnings: what could not be allocated
}
_MIB = 2**20


class Memory(NamedTuple):
    """What a process uses, in MiB.

    Attributes:
        resident: Now, files included.
        peak: The largest `resident` since the last `Accelerators.rest`.
        data: What the limit applies to.
    """

    resident: float
    peak: float
    data: float


class Accelerators:
    """Processes that each offer a CPU device to one controlling process.

    Args:
        count: How many. Positive.

    Attributes:
        cluster: Their addresses, as `tf.train.ClusterSpec` takes them.
        processes: The processes.
        connections: Where to send questions; see `ask`.
        log: File with what they have to say.
    """

    def __init__(self, count: int) -> None:
        ports = _free_ports(count)
        self.cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self.log = pathlib.Path(self._folder.name) / "log"
        for task in range(count):
            process, connection = start(_serve, self.cluster, task, self.log)
            self.processes.append(process)
            self.connections.append(connection)
        ask(self.connections, "rest")  # answered when they are ready

    def out_of_memory(self, seconds: float = 0) -> str:
        """How an accelerator that ran out of memory shows it."""
        if "RESOURCE_EXHAUSTED" in self.log.read_text(errors="replace"):
            return "a tensor was refused"
        sentinels = [process.sentinel for process in self.processes]
        if multiprocessing.connection.wait(sentinels, seconds):
            return "a process died"
        return ""

    def close(self) -> None:
        """Ends them."""
        for process in self.processes:
            stop(process)
        self._folder.cleanup()


def device(task: int) -> str:
    """TensorFlow's name for an accelerator's device."""
    return f"/job:worker/replica:0/task:{task}/device:CPU:0"


def ask(connections: list[Connection], *question: Any) -> list[Any]:
    """Asks all accelerators at once."""
    for connection in connections:
        connection.send(question)
    return [connection.recv() for connection in connections]


def start(
    function: Callable[..., None], *arguments: Any
) -> tuple[BaseProcess, Connection]:
    """Runs a function in a process that has TensorFlow."""
    context = _context()
    ours, theirs = context.Pipe()
    process = context.Process(
        target=function, args=(theirs, *arguments), daemon=True
    )
    process.start()
    theirs.close()  # so that the end of the process is noticed
    return process, ours


def stop(process: BaseProcess) -> None:
    """Ends a process."""
    process.kill()
    process.join()


def peak_of(step: Callable[[], Any]) -> float:
    """MiB that a step takes in this process, above what it rests at."""
    step()
    return peak_of_one(lambda: (step(), step()))


def peak_of_one(action: Callable[[], Any]) -> float:
    """MiB that an action takes in this process, above what it rests at."""
    _rest()
    rest = _memory().resident
    action()
    return _memory().peak - rest


def log_to(path: pathlib.Path) -> None:
    """Appends to a file what this process writes to its standard error."""
    with path.open("a") as file:
        os.dup2(file.fileno(), 2)


def _context() -> ForkServerContext:
    """Makes processes that have the environment that exact memory needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tfgpipe", "tools.bench.models"])
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# -------------------------------------------------- in an accelerator's process
def _serve(
    connection: Connection, cluster: dict, task: int, log: pathlib.Path
) -> None:
    """Offers a device; answers questions until the other side is gone."""
    log_to(log)
    import tensorflow as tf

    one_thread = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
    )
    server = tf.distribute.Server(
        cluster,
        job_name="worker",
        task_index=task,
        protocol="grpc",
        config=one_thread,
    )
    actions = {"limit": _limit, "rest": _rest, "memory": lambda: None}
    for name, *arguments in _questions(connection):
        actions[name](*arguments)
        connection.send(_memory())
    del server


def _questions(connection: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError):
        while True:
            yield connection.recv()


def _limit(mib: float) -> None:
    import resource  # not on Windows

    most = int((_memory().data + mib) * _MIB)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _rest() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _memory() -> Memory:
    text = pathlib.Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines())
    kib = [int(lines[key].split()[0]) for key in ("VmRSS", "VmHWM", "VmData")]
    return Memory(*(value / 1024 for value in kib))
