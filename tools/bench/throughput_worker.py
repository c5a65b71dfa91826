"""One process of `tools.bench throughput`: trains one pipeline when asked to.

Restricts itself to some cores, makes the pipeline, does a first step, which
traces, prints `READY {json}`, and then answers each line "step" by `T {json}`
with the seconds of one more step. Anything else ends it.
"""

import json
import os
import sys
from typing import Any, NamedTuple

from tools.bench.step_worker import answer


class Job(NamedTuple):
    """What a process does.

    Attributes:
        model: Name in `tools.bench.models.MODELS`.
        schedule: As in `tfgpipe.GPipe`.
        remat: As in `tfgpipe.GPipe`.
        k: Devices, one core each.
        m: Micro-batches.
        chunks: Cells of a device.
        batch_size: Examples in a mini-batch.
        jit: "on" if XLA compiles the cells, else "off".
    """

    model: str
    schedule: str
    remat: str
    k: int
    m: int
    chunks: int
    batch_size: int
    jit: str = "off"


def main(argv: list[str]) -> None:
    """Does what the only argument, a `Job` in JSON, says."""
    job = Job(**json.loads(argv[1]))
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-job.k :])
    answer(_prepare(job))


def _prepare(job: Job) -> Any:
    # TensorFlow starts as many threads as there are cores: not earlier.
    import keras

    import tfgpipe
    from tfgpipe.devices import local
    from tools.bench.models import MODELS

    local.split_cpu(job.k)
    keras.utils.set_random_seed(0)
    what = MODELS[job.model]
    model = tfgpipe.GPipe(
        what.layers(),
        num_partitions=job.k * job.chunks,
        num_micro_batches=job.m,
        devices=[f"CPU:{index}" for index in range(job.k)],
        schedule=job.schedule,
        remat=job.remat,
    )
    model.build((None, *what.x_shape))
    return what.step(model, job.batch_size, job.jit == "on")


if __name__ == "__main__":
    main(sys.argv)
