"""One process of `tools.bench throughput`: trains one model.

Restricts itself to some cores, makes the model, does a first step, which
traces, and then answers as `step_worker` says.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NamedTuple

from tools.bench.step_worker import answer


class Job(NamedTuple):
    """What a process does.

    Attributes:
        model: Name in `tools.bench.models.MODELS`.
        k: Devices, one core each.
        m: Micro-batches.
    """

    model: str
    k: int = 1
    m: int = 1


def main(argv: list[str]) -> None:
    """Does what the only argument, a `Job` in JSON, says."""
    job = Job(**json.loads(argv[1]))
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-job.k :])
    # TensorFlow starts as many threads as there are cores: not earlier.
    import keras

    import tfgpipe
    from tfgpipe.devices import local
    from tools.bench.models import MODELS

    local.split_cpu(job.k)
    keras.utils.set_random_seed(0)
    known = MODELS[job.model]
    model = tfgpipe.GPipe(
        [keras.Input(known.x_shape), *known.layers()],
        num_partitions=job.k,
        num_micro_batches=job.m,
        devices=[f"CPU:{index}" for index in range(job.k)],
        remat="always",  # so that all compute the same
    )
    answer(known.step(model))


if __name__ == "__main__":
    main(sys.argv)
