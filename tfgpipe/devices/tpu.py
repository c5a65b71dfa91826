"""Cloud TPU: its cores as the devices of pipelines.

    topology     the chips, their coordinates, and which host has which
    assignment   (replica r, logical core k): a core of the topology
    grid[r][k]   that core as a device: cell k of replica r is on it

A TPU is a mesh of chips, of one or two cores each. Neighbours in a pipeline
should be neighbours in the mesh. So each host's cores are put in the order of a
path from chip to chip, along the rows of the mesh and back again, and the
replicas are cut from it, K cores each, host after host: consecutive cells are
on one chip or on chips side by side, and cells change hosts only where a
replica does not fit into what is left of one.

From there on a TPU is what several GPUs are: a cell's variables and tasks are
placed on its core by name, and the step is one graph for all cores. XLA
compiles each task's function for its core, as it does under `jit_compile`.

Why not `tf.distribute.TPUStrategy`: it takes the same `DeviceAssignment`, but
runs a program for each replica, which has other random numbers, statistics and
means, and which XLA compiles as a whole, for one number of rows. What
`PipelineStrategy` promises of replicas would have to be promised again, for
TPUs alone, where nobody could try it without one.

Limits: this has not been run on a TPU. TensorFlow's tests do run on TPUs what
it is built from: functions under `tf.device("/device:TPU:0")` inside of a
`tf.function` (tpu_strategy_test.py), and functions with `jit_compile` on a TPU
device (polymorphic_function_xla_jit_test.py). The cores of a chip count by
themselves, as TensorFlow lists them.

Reference: [Use TPUs](https://www.tensorflow.org/guide/tpu)
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe.checks import checked_counts

_RETRY = 1.0  # seconds


def connect_to_tpu(tpu: str = "local", timeout: float = 60.0) -> Any:
    """Connects to a TPU and starts it. To be called once, before all else.

    Args:
        tpu: "local" on a TPU VM; else the name of a TPU that Google Cloud
            knows, or the address of its first host, grpc://host:port.
        timeout: Seconds to wait for the TPU's hosts.

    Returns:
        The `tf.tpu.experimental.Topology`.

    Raises:
        ValueError: If there is no such TPU, or it cannot be reached or used.

    Example:

    >>> topology = connect_to_tpu("local")  # doctest: +SKIP
    >>> assignment = tpu_device_assignment(
    ...     topology, num_replicas=1, num_partitions=8
    ... )  # doctest: +SKIP
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
        if tpu != "local":  # TensorFlow would wait for ever
            _await_hosts(resolver.cluster_spec(), timeout)
        tf.config.experimental_connect_to_cluster(
            resolver,
            make_master_device_default=False,  # data are read on this host
        )
        return tf.tpu.experimental.initialize_tpu_system(resolver)
    except (
        ImportError,
        OSError,
        RuntimeError,
        ValueError,
        tf.errors.OpError,
    ) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            '`tpu` must be "local" on a TPU VM, or else the name or the '
            "address, grpc://host:port, of a TPU that this host reaches. "
            f"Received: tpu={tpu!r}, and this error: {first_line}\nCheck that "
            "the TPU is there and that TensorFlow was installed with support "
            "for it (`pip show tensorflow-tpu`)."
        ) from error


def _await_hosts(cluster: tf.train.ClusterSpec, timeout: float) -> None:
    """Waits until something listens at all addresses.

    Raises:
        ConnectionError: If something does not in time.
    """
    until = time.monotonic() + timeout
    for job in cluster.jobs:
        for address in cluster.job_tasks(job):
            host, _, port = address.rpartition(":")
            while True:
                try:
                    left = max(_RETRY, until - time.monotonic())
                    socket.create_connection((host, int(port)), left).close()
                    break
                except OSError as error:
                    if time.monotonic() + _RETRY > until:
                        raise ConnectionError(
                            f"No answer from {address} in {timeout:g} "
                            f"seconds: {error}."
                        ) from error
                    time.sleep(_RETRY)


def tpu_device_assignment(
    topology: Any, num_replicas: int, num_partitions: int
) -> Any:
    """Lays R pipelines of K cores into a TPU.

    Args:
        topology: What `connect_to_tpu` returned.
        num_replicas: R, at least 1.
        num_partitions: K, at least 1.

    Returns:
        A `tf.tpu.experimental.DeviceAssignment` of R replicas with K logical
        cores each.

    Raises:
        ValueError: If it is no topology, a number is out of range, or there
            are not so many cores.

    Example:

    >>> topology = tf.tpu.experimental.Topology(
    ...     mesh_shape=[1, 1, 1, 2],
    ...     device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]],
    ... )
    >>> assignment = tpu_device_assignment(topology, 1, 2)
    >>> assignment.tpu_device(replica=0, logical_core=1)
    '/task:0/device:TPU:1'
    """
    if not isinstance(topology, tf.tpu.experimental.Topology):
        raise ValueError(
            "`topology` must be a `tf.tpu.experimental.Topology`. Received: "
            f"topology={topology!r}. Pass what `connect_to_tpu` returned."
        )
    num_replicas, num_partitions = checked_counts(
        num_replicas=num_replicas, num_partitions=num_partitions
    )
    path = _path(topology)
    wanted = num_replicas * num_partitions
    if wanted > len(path):
        raise ValueError(
            "`num_replicas` times `num_partitions` must be at most the number "
            f"of cores of the TPU, {len(path)}. Received: {num_replicas} times "
            f"{num_partitions}. Ask for fewer, or for a larger TPU."
        )
    return tf.tpu.experimental.DeviceAssignment(
        topology, path[:wanted].reshape(num_replicas, num_partitions, -1)
    )


def _path(topology: Any) -> np.ndarray:
    """Returns all cores along a path through each host's chips, (cores, 4)."""
    _, num_rows, _, _ = topology.mesh_shape

    def place(coordinates: np.ndarray) -> tuple[int, ...]:
        x, y, z, core = (int(c) for c in coordinates)
        row = z * num_rows + (num_rows - 1 - y if z % 2 else y)
        return row, -x if row % 2 else x, core

    return np.array(
        [
            c
            for host in topology.device_coordinates
            for c in sorted(host, key=place)
        ]
    )
