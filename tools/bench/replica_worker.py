"""One process of `tools.bench replicas`: R replicas of K cells that wait.

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
from typing import NamedTuple

from tools.bench.step_worker import answer, command_of


class Job(NamedTuple):
    """What a process does.

    Attributes:
        r: Replicas.
        k: Devices of a replica.
        m: Micro-batches of a replica.
        cell_ms: Milliseconds of a forward task.
        cell_mib: MiB of a cell's weights.
        processes: That share the devices: workers, or for 1 this one.
    """

    r: int
    k: int
    m: int
    cell_ms: float
    cell_mib: float
    processes: int

    def command(self) -> list[str]:
        """The program that does it."""
        return command_of("tools.bench.replica_worker", self)


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
    from tools import devices
    from tools.cluster import controller, local_workers

    count = job.r * job.k
    if job.processes == 1:
        devices.split_cpu(count)
        return [f"CPU:{index}" for index in range(count)]
    devices.split_cpu(1)
    workers = stack.enter_context(
        local_workers.LocalWorkers(job.processes, count // job.processes)
    )
    connected = controller.Cluster(workers.hosts, count)
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
    layers = [
        Sleeping(job.cell_ms / 1000, [size] * 4, is_first=c == 0)
        for c in range(job.k)
    ]
    with tfgpipe.PipelineStrategy(job.r, job.k, names).scope():
        model = tfgpipe.GPipe(
            layers, num_micro_batches=job.m, layers_per_cell=[1] * job.k
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    rows = np.ones((job.r * job.m, 1), np.float32)
    model.build((None, 1))
    mib = sum(exchanged_bytes(model).values()) / 2**20
    return train_step(model, rows, rows), mib


if __name__ == "__main__":
    main(sys.argv)
