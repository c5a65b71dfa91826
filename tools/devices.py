"""The devices of a run: parts of a CPU, a TPU's cores, replicas."""

import tfgpipe
from params import Experiment
from tfgpipe.devices.names import accelerators
from tfgpipe.schedules import CHUNKS, devices_for


def cpu_names(count: int) -> list[str]:
    """Names of the first parts of a CPU that is split."""
    return [f"CPU:{index}" for index in range(count)]


def tpu_cores(tpu: str, wanted: int, timeout: float) -> list[str]:
    """Connects to a TPU. To be called before TensorFlow runs anything."""
    topology = tfgpipe.connect_to_tpu(tpu, timeout)
    num_hosts, per_host, _ = topology.device_coordinates.shape
    found = num_hosts * per_host
    if found < wanted:
        raise ValueError(
            "The replicas times the cells of each must be at most the number "
            f"of cores of the TPU. Received: {wanted} wanted, of {found}. Ask "
            "for fewer, or for a larger TPU."
        )
    assignment = tfgpipe.tpu_device_assignment(topology, 1, found)
    return [assignment.tpu_device(0, k) for k in range(found)]


def strategy(
    num_replicas: int, experiment: Experiment, names: list[str] | None = None
) -> tfgpipe.PipelineStrategy:
    """Replicas of an experiment's pipeline.

    An interleaved schedule, which has any number of cells on a device, gets
    all devices; others get as many as their cells need.
    """
    if CHUNKS[experiment.schedule] is None:
        names = names or accelerators()
    found = len(names or ()) // num_replicas
    k = devices_for(experiment.schedule, experiment.num_partitions, found)
    if names is not None:
        names = names[: num_replicas * k]
    return tfgpipe.PipelineStrategy(num_replicas, k, names)
