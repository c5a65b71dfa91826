"""One process of `tools.bench replicas`: R replicas of cells that wait.

The devices are its own, or those of workers that it starts on this machine. It
does a first step, which traces, prints `READY {json}`, and then answers each
line "step" by `T {json}` with the seconds of one more step. Anything else ends
it, and its workers.
"""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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
    from tools.bench.delayed_links import DelayedCluster

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
    from tools.bench.exchange import exchanged_bytes
    from tools.bench.models import train_step
    from tools.bench.sleeping_layers import Sleeping

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


if __name__ == "__main__":
    main(sys.argv)
