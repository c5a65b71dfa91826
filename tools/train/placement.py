"""The devices that the flags of `tools.train` and an experiment ask for."""

import contextlib
import functools
import math
import os
import sys

import tensorflow as tf

import params
import tfgpipe
from params import Experiment
from tfgpipe import internals
from tfgpipe.devices import local
from tfgpipe.hosts.addresses import Hosts
from tfgpipe.monitor import measurements
from tfgpipe.plans import DeviceMemory, machine_here
from tfgpipe.schedules import CHUNKS, devices_for
from tools import devices
from tools.sizes.model_size import num_parameters, predicted
from tools.sizes.parameter_counts import PARAMETER_COUNTS
from tools.train.flags import FLAGS

_HOST = "this computer, of which all devices are parts"
_GIB = 2**30
# Share of the memory up to which weights are small: with Adam's slots, with
# gradients and copies, all fits if activations need as much again.
_SMALL = 0.1
_CURES = (
    "--dry_run shows what each device would hold, tools.plan chooses settings "
    "that need less, and --list has smaller models."
)


def _num_devices(experiment: Experiment) -> int:
    """Devices that the flags and the experiment ask for, R K."""
    k = max(experiment.num_partitions, FLAGS.compare_num_partitions or 1)
    return _devices_of(experiment, k)


def _devices_of(experiment: Experiment, k: int) -> int:
    """Devices of all replicas for K cells."""
    return FLAGS.num_replicas * devices_for(experiment.schedule, k, k)


@functools.cache
def _all_cores() -> list[int]:
    """The cores that this process had when it began."""
    return sorted(os.sched_getaffinity(0))


def check_cores(experiment: Experiment) -> None:
    """Gives operations as many threads as --cores_per_device says."""
    count = FLAGS.cores_per_device
    if count is None:
        return
    others = FLAGS.workers or FLAGS.tpu or os.environ.get("TF_CONFIG")
    is_split = FLAGS.num_virtual_devices or not local.has_accelerator()
    needed = count * _num_devices(experiment)
    if others or not is_split or needed > len(_all_cores()):
        raise ValueError(
            "--cores_per_device needs Linux, devices that are parts of this "
            f"computer's CPU, and {needed} cores. Received: --cores_per_device="
            f"{count}. Leave it out: devices share all cores then."
        )
    tf.config.threading.set_intra_op_parallelism_threads(count)


def keep_to_cores(experiment: Experiment) -> None:
    """Keeps all threads to the cores of the experiment's devices."""
    if FLAGS.cores_per_device is None:
        return
    devices = _devices_of(experiment, experiment.num_partitions)
    cores = _all_cores()[: FLAGS.cores_per_device * devices]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def fewest_devices(experiment: Experiment) -> int:
    """Devices that there must be: an interleaved schedule shares them."""
    if CHUNKS[experiment.schedule] is None:
        return FLAGS.num_replicas
    return _num_devices(experiment)


def of_dry_run(experiment: Experiment) -> int:
    """Devices that a replica would have here."""
    k = experiment.num_partitions
    found = FLAGS.num_virtual_devices or local.num_accelerators()
    found = found // FLAGS.num_replicas if found else k
    return devices_for(experiment.schedule, k, found)


def check_memory(experiment: Experiment) -> None:
    """Refuses a model that does not fit into the memory of this computer.

    What it holds is what `tfgpipe.plan` predicts, which takes a while; not
    where the weights are a small part of the memory, or more than all of it.
    Where activations alone are too much, it is said, and no more: they may be
    less in fact.
    """
    limit, where = _memory()
    is_host, r = where == _HOST, FLAGS.num_replicas
    parts = 1 if is_host else _num_devices(experiment)
    head = f"{experiment.name} must fit into the memory of {where}. Expected: "
    with internals.names_kept():  # the model gets them
        num_values = _num_parameters(experiment)
        weights = 4 * num_values
        if weights < _SMALL * limit * parts:
            return
        if r * weights > limit * parts:
            raise ValueError(
                f"{head}at most {limit * parts / _GIB:,.1f} GiB on {parts} "
                f"devices. Received: weights alone of "
                f"{r * weights / _GIB:,.1f} GiB, {num_values:,} parameters in "
                f"each of {r} replicas. {_CURES}"
            )
        _, prediction = predicted(experiment, of_dry_run(experiment), r)
    held = max(prediction.memory, key=lambda memory: memory.total)
    if is_host:
        held = DeviceMemory(
            *(r * sum(parts) for parts in zip(*prediction.memory))
        )
    if held.total <= limit:
        return
    text = ", ".join(
        f"{name} {part / _GIB:,.1f}" for name, part in zip(held._fields, held)
    )
    problem = (
        f"{head}at most {limit / _GIB:,.1f} GiB. Received: "
        f"{held.total / _GIB:,.1f} GiB, as predicted for {num_values:,} "
        f"parameters: {text}. {_CURES}"
    )
    if held.weights + held.slots + held.gradients > limit:
        raise ValueError(problem)
    print(
        f"tools.train: {problem} It may be less, so it is tried.",
        file=sys.stderr,
        flush=True,
    )


def _memory() -> tuple[float, str]:
    """Bytes of a device, or of the host that all are parts of; and which."""
    if FLAGS.num_virtual_devices or not local.has_accelerator():
        return measurements.host_bytes(), _HOST
    machine = machine_here()
    if machine is None:
        return math.inf, ""
    return machine.memory, f"each device, one of kind {machine.name}"


def _num_parameters(experiment: Experiment) -> int:
    known = PARAMETER_COUNTS.get(experiment.name)
    if known is None or params.get(experiment.name).model != experiment.model:
        return num_parameters(experiment)
    return known


def tpu_cores(experiment: Experiment) -> list[str]:
    """Connects to the TPU; returns its cores."""
    if FLAGS.workers or FLAGS.num_virtual_devices or "TF_CONFIG" in os.environ:
        raise ValueError(
            "--tpu must be given without --workers, --num_virtual_devices and "
            "TF_CONFIG. Received: one of these. A TPU's hosts belong to it."
        )
    return devices.tpu_cores(
        FLAGS.tpu, fewest_devices(experiment), FLAGS.connect_timeout
    )


def split_cpu(experiment: Experiment, found: Hosts | None) -> int | None:
    """Splits the CPU where the experiment or a flag wants it."""
    needed = _num_devices(experiment)
    asked = FLAGS.num_virtual_devices
    if found is not None and found.here is None:
        if asked:
            raise ValueError(
                "--num_virtual_devices must not be given with --workers. "
                f"Received: --num_virtual_devices={asked}. Give it to "
                "`tfgpipe worker`, on each host."
            )
        local.hide_accelerators()
        needed = 1
    elif found is not None:
        needed = -(-needed // len(found.all))
    elif asked and asked < (fewest := fewest_devices(experiment)):
        raise ValueError(
            "--num_virtual_devices must be at least the number of cells, "
            f"those of all replicas, {fewest}. Received: "
            f"--num_virtual_devices={asked}."
        )
    if not asked and local.has_accelerator():
        return None
    if found is None or found.here in (None, found.controller):
        local.split_cpu(asked or needed)
    return asked or needed


def strategy(
    experiment: Experiment, names: list[str] | None
) -> tfgpipe.PipelineStrategy | None:
    """The replicas and their devices; None for one on the first devices."""
    if FLAGS.num_replicas == 1 and names is None:
        return None
    return devices.strategy(FLAGS.num_replicas, experiment, names)
