"""One process of `tools.bench replicas`: R replicas of cells that wait.

The devices are its own, or those of workers that it starts on this machine. It
does a first step, which traces, prints `READY {json}`, and then answers each
line "step" by `T {json}` with the seconds of one more step. Anything else ends
it, and its workers.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from tfgpipe.hosts import controller
from tfgpipe.hosts.addresses import Host, Hosts
from tools.bench.step_worker import answer

if TYPE_CHECKING:  # TensorFlow starts later
    from tfgpipe.schedules import Schedule


class Job(NamedTuple):
    """What a process does.

    Attributes:
        r: Replicas.
        k: Devices of a replica.
        m: Micro-batches of a replica.
        cell_ms: Milliseconds of a forward task.
        cell_mib: MiB of a cell's weights.
        processes: That share the devices: workers, or for 1 this one.
        schedule: Its name.
        chunks: Cells of a device, which share its time.
        link_ms: Milliseconds from one process to another.
        share: Of a cell's time, which the schedule allows for links.
        remat: What is computed again.
    """

    r: int
    k: int
    m: int
    cell_ms: float
    cell_mib: float
    processes: int
    schedule: str = "gpipe"
    chunks: int = 1
    link_ms: float = 0.0
    share: float = 0.0
    remat: str = "except_last"

    def schedule_made(self) -> "Schedule":
        """The tasks of a replica."""
        from tfgpipe.schedules import SCHEDULES

        options = {"link_share": self.share} if self.share else {}
        make = SCHEDULES[self.schedule]
        return make(self.k, self.m, self.chunks, **options)


def main(argv: list[str]) -> None:
    """Does what the only argument, a `Job` in JSON, says."""
    job = Job(**json.loads(argv[1]))
    # TensorFlow warns of operations with effects: here that they take time.
    warnings.filterwarnings("ignore", category=UserWarning)
    with contextlib.ExitStack() as stack:
        step, mib = _prepared(job, _devices(job, stack))
        answer(step, exchanged_mib=mib)


def _devices(job: Job, stack: contextlib.ExitStack) -> list[str]:
    """Names of the devices, those of a replica one after the other."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the workers, too
    from tfgpipe.devices import local
    from tfgpipe.hosts import controller
    from tools import local_workers

    count = job.r * job.k
    if job.processes == 1:
        local.split_cpu(count)
        return [f"CPU:{index}" for index in range(count)]
    local.split_cpu(1)
    workers = stack.enter_context(
        local_workers.LocalWorkers(job.processes, count // job.processes)
    )
    seconds = job.link_ms / 1000
    connected = (
        DelayedCluster(workers.hosts, count, seconds)
        if seconds
        else controller.Cluster(workers.hosts, count)
    )
    return stack.enter_context(connected).devices


def _prepared(job: Job, names: list[str]) -> tuple[Callable[[], float], float]:
    """A function that does a step, and the MiB that replicas exchange."""
    import keras
    import numpy as np

    import tfgpipe
    from tools.bench.models import train_step
    from tools.bench.replicas import exchanged_bytes
    from tools.bench.waiting_layers import Sleeping

    # Four weights a cell, so that up to four replicas can share them out.
    size = max(1, round(job.cell_mib * 2**20 / 4 / 4))
    count = job.k * job.chunks
    layers = [
        Sleeping(job.cell_ms / 1000 / job.chunks, [size] * 4, is_first=c == 0)
        for c in range(count)
    ]
    with tfgpipe.PipelineStrategy(job.r, job.k, names).scope():
        model = tfgpipe.GPipe(
            layers,
            num_micro_batches=job.m,
            num_partitions=count,
            layers_per_cell=[1] * count,
            schedule=job.schedule_made() if job.share else job.schedule,
            remat=job.remat,
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    rows = np.ones((job.r * job.m, 1), np.float32)
    model.build((None, 1))
    mib = sum(exchanged_bytes(model).values()) / 2**20
    return train_step(model, rows, rows), mib


_CHUNK = 2**16  # bytes


class DelayedLinks:
    """Relays, in a thread of their own.

    Args:
        seconds: How long a byte takes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def to(self, address: str) -> str:
        """A new address, of this machine, that leads to another one."""
        return self._run(self._relay(address))

    def _run(self, work: Coroutine[Any, Any, str]) -> str:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _relay(self, address: str) -> str:
        host, _, port = address.rpartition(":")

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            try:
                there, back = await asyncio.open_connection(host, int(port))
            except OSError:
                writer.close()
                return
            await asyncio.gather(
                self._hand_on(reader, back), self._hand_on(there, writer)
            )

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _hand_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Writes what it reads, later, until one of the ends closes."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(due - self._loop.time())
                if not data:
                    writer.close()
                    return
                writer.write(data)

        writing = asyncio.create_task(write())
        data = b"-"
        while data:
            try:
                data = await reader.read(_CHUNK)
            except OSError:
                data = b""
            waiting.put_nowait((self._loop.time() + self._seconds, data))
        await writing


class DelayedCluster(controller.Cluster):
    """Workers that are reached, and reach each other, over such links.

    Args:
        hosts: As those of `Cluster`.
        num_devices: As those of `Cluster`.
        seconds: How long each way takes.
    """

    def __init__(self, hosts: Hosts, num_devices: int, seconds: float) -> None:
        self._delayed = DelayedLinks(seconds)
        super().__init__(hosts, num_devices)

    def _start_tensorflow(self, addresses: dict[Host, str]) -> None:
        super()._start_tensorflow(
            {host: self._delayed.to(own) for host, own in addresses.items()}
        )


if __name__ == "__main__":
    main(sys.argv)
