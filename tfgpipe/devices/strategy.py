"""Replicas: several equal pipelines that train one model. And Cloud TPUs.

    grid[r][k]   the device of cell k in replica r

Every replica runs the whole pipeline, each on its own M micro-batches of the
mini-batch. So R replicas are one pipeline of R M micro-batches whose devices
are R times as many, and that is how they are made: one thread traces one graph,
in which micro-batch b of the R M is on the devices of replica b // M. What is
promised of micro-batches holds without a further word: losses, weights of rows,
masks, random numbers, statistics, uneven and tiny mini-batches.

A variable, with its slots, has one owner in the column of the grid that holds
its cell; each device owns about 1/R of the bytes. A step sends each cell's
weights to the devices of its column when it starts, and when the cell's last
backward tasks are done, while other cells still work, the owners add up the
column's gradients. That moves what an all-reduce does, and no replica can drift
from the others. Clipping, loss scaling, accumulation and averages see finished
gradients, once.

For TensorFlow and Keras there is one replica: `num_replicas_in_sync` is 1, and
`run` calls a function once, with all rows: code that was written for a strategy
divides by no number twice, and Keras feeds whole mini-batches. In
`MirroredStrategy` and `TPUStrategy` each replica has random numbers, statistics
and means of its own, and copies of the variables.

Devices may be on other hosts that TensorFlow is connected to: the graph
is the same. Limits: one process traces it, and feeds the data. Variables that
are not trained are on the first replica's devices.

A TPU is a mesh of chips, of one or two cores each, which are devices as several
GPUs are. Neighbours in a pipeline should be neighbours in the mesh. So each
host's cores are put in the order of a path from chip to chip, along the rows of
the mesh and back again, and the replicas are cut from it, K cores each, host
after host: consecutive cells are on one chip or on chips side by side, and
cells change hosts only where a replica does not fit into what is left of one.
This has not been run on a TPU.

References: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 1,
on data parallelism beside pipelines;
[Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054) on optimizer state
that has one owner among replicas;
[Use TPUs](https://www.tensorflow.org/guide/tpu).
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.checks import checked_counts
from tfgpipe.devices.names import SPLIT_CPU, accelerators, resolved


class PipelineStrategy(internals.SingleReplicaStrategy):
    """R replicas of a pipeline of K devices.

    A `GPipe` that is made in the `scope()` of this strategy splits every
    mini-batch among R pipelines. With M micro-batches a replica, its loss,
    metrics and weights are the same as of one pipeline with R M micro-batches.

    Args:
        num_replicas: R, at least 1.
        num_partitions: K, the number of devices of a replica, at least 1.
        devices: R K devices: names, such as "GPU:0", or for another host
            "/job:worker/replica:0/task:1/device:GPU:0", or what
            `tf.config.list_logical_devices` returns: the K of the first
            replica, then those of the second, and so on. Defaults to the first
            R K accelerators that TensorFlow lists: TPUs, or GPUs, or else CPUs.

    Attributes:
        num_replicas: R. For TensorFlow the replicas are one:
            `num_replicas_in_sync` is 1, and batch sizes are those of whole
            mini-batches.
        num_partitions: K.
        devices: Full names of the devices, a tuple a replica.

    Raises:
        ValueError: If an argument is out of range, or there are not so many
            devices.

    Example:

    >>> import keras
    >>> import tfgpipe
    >>> strategy = PipelineStrategy(num_replicas=1, num_partitions=1)
    >>> with strategy.scope():
    ...     model = tfgpipe.GPipe(
    ...         [keras.layers.Dense(8) for _ in range(4)], num_micro_batches=2
    ...     )
    ...     model.compile("adam", "mse")
    >>> model.num_replicas
    1
    """

    def __init__(
        self,
        num_replicas: int,
        num_partitions: int,
        devices: Sequence[str | tf.config.LogicalDevice] | None = None,
    ):
        num_replicas, num_partitions = checked_counts(
            num_replicas=num_replicas, num_partitions=num_partitions
        )
        self.num_replicas, self.num_partitions = num_replicas, num_partitions
        wanted = num_replicas * num_partitions
        if devices is None:
            names = accelerators()[:wanted]
        else:
            names = resolved([*devices])
        if len(names) != wanted:
            raise ValueError(
                "`devices` must be `num_replicas` times `num_partitions`, "
                f"{num_replicas} times {num_partitions}. Received: "
                f"{len(names)}, {names}. Ask for fewer; {SPLIT_CPU}."
            )
        self.devices = tuple(
            tuple(names[r * num_partitions : (r + 1) * num_partitions])
            for r in range(num_replicas)
        )
        super().__init__()

    @classmethod
    def from_strategy(
        cls, strategy: tf.distribute.Strategy, num_partitions: int
    ) -> PipelineStrategy:
        """Replicas of pipelines on the devices of a strategy of TensorFlow.

        Args:
            strategy: A `tf.distribute.MirroredStrategy`, `OneDeviceStrategy`
                or `TPUStrategy`. Only its devices are taken: the first K become
                the first replica, and so on.
            num_partitions: K, which divides the number of devices.

        Returns:
            A `PipelineStrategy`. For a `TPUStrategy`, a `TPUPipelineStrategy`
            with its `DeviceAssignment`, which must be of K cores a replica.

        Raises:
            ValueError: If it is another strategy, or K does not divide the
                number of devices.

        Example:

        >>> mirrored = tf.distribute.MirroredStrategy(["CPU:0"])
        >>> PipelineStrategy.from_strategy(mirrored, num_partitions=1)
        <PipelineStrategy num_replicas=1 num_partitions=1>
        """
        (num_partitions,) = checked_counts(num_partitions=num_partitions)
        if isinstance(strategy, _TPU):
            assignment = internals.device_assignment(strategy)
            has = getattr(assignment, "num_cores_per_replica", None)
            if has != num_partitions:
                raise ValueError(
                    "`strategy` must be a `TPUStrategy` with a "
                    "`DeviceAssignment` of `num_partitions` cores a replica. "
                    f"Received: {has}, and num_partitions={num_partitions}. Or "
                    "use `tfgpipe.tpu_device_assignment`."
                )
            return TPUPipelineStrategy(assignment)
        is_local = isinstance(strategy, _LOCAL)
        devices = [*strategy.extended.worker_devices] if is_local else []
        if not devices or len(devices) % num_partitions:
            raise ValueError(
                "`strategy` must be a `tf.distribute.MirroredStrategy`, "
                "`OneDeviceStrategy` or `TPUStrategy`, the number of whose "
                f"devices `num_partitions` divides. Received: {strategy!r} "
                f"of {devices}, and num_partitions={num_partitions}. Or name "
                "`devices` to `tfgpipe.PipelineStrategy`."
            )
        count = len(devices) // num_partitions
        return cls(count, num_partitions, devices)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} num_replicas={self.num_replicas} "
            f"num_partitions={self.num_partitions}>"
        )


class TPUPipelineStrategy(PipelineStrategy):
    """R replicas of a pipeline of K cells on the cores of a TPU.

    Args:
        device_assignment: A `tf.tpu.experimental.DeviceAssignment`, such as
            that of `tpu_device_assignment`: cell k of replica r goes to the
            core that it has for replica r and logical core k.

    Attributes:
        device_assignment: The same.

    Raises:
        ValueError: If TensorFlow does not list its cores.

    See `PipelineStrategy` for the rest. Not run on a TPU so far.

    Example:

    >>> topology = connect_to_tpu()  # doctest: +SKIP
    >>> strategy = TPUPipelineStrategy(
    ...     tpu_device_assignment(topology, num_replicas=2, num_partitions=4)
    ... )  # doctest: +SKIP
    >>> with strategy.scope():  # doctest: +SKIP
    ...     model = GPipe(layers, num_micro_batches=16)
    ...     model.compile("adam", "mse")
    """

    def __init__(self, device_assignment: Any):
        self.device_assignment = device_assignment
        num_replicas = device_assignment.num_replicas
        num_partitions = device_assignment.num_cores_per_replica
        places = itertools.product(range(num_replicas), range(num_partitions))
        devices = [device_assignment.tpu_device(*place) for place in places]
        super().__init__(num_replicas, num_partitions, devices)


def any_current() -> tf.distribute.Strategy | None:
    """Returns the `tf.distribute` strategy of the current scope, or None."""
    has_one = tf.distribute.has_strategy()
    return tf.distribute.get_strategy() if has_one else None


def current() -> PipelineStrategy | None:
    """Returns the strategy of the current scope, or None.

    Raises:
        ValueError: If it is one that does not know of pipelines.
    """
    strategy = any_current()
    if strategy is not None and not isinstance(strategy, PipelineStrategy):
        raise ValueError(
            "A `GPipe` must be made in the scope of a "
            "`tfgpipe.PipelineStrategy`, or of no `tf.distribute` strategy. "
            f"Received: the scope of {strategy}. {INSTEAD}"
        )
    return strategy


_LOCAL = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)

_TPU = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)


# What replaces another strategy.
INSTEAD = (
    "For replicas of a pipeline, make the model in the `scope()` of a "
    "`tfgpipe.PipelineStrategy(num_replicas, num_partitions)`, or of "
    "`tfgpipe.PipelineStrategy.from_strategy(strategy, num_partitions)`."
)


# ------------------------------------------------------------------------ TPUs
def connect_to_tpu(tpu: str = "local", timeout: float = 60.0) -> Any:
    """Connects to a TPU and starts it. To be called once, before all else.

    Args:
        tpu: "local" on a TPU VM; else the name of a TPU that Google Cloud
            knows, or the address of its first host, grpc://host:port.
        timeout: Seconds to wait for an answer of each of the TPU's hosts.

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
            cluster = resolver.cluster_spec()
            for address in itertools.chain(
                *map(cluster.job_tasks, cluster.jobs)
            ):
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout).close()
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
            "it is there, and `pip show tensorflow-tpu`."
        ) from error


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
        ValueError: If a number is out of range, or there are not so many
            cores.

    Example:

    >>> topology = tf.tpu.experimental.Topology(
    ...     mesh_shape=[1, 1, 1, 2],
    ...     device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]],
    ... )
    >>> assignment = tpu_device_assignment(topology, 1, 2)
    >>> assignment.tpu_device(replica=0, logical_core=1)
    '/task:0/device:TPU:1'
    """
    num_replicas, num_partitions = checked_counts(
        num_replicas=num_replicas, num_partitions=num_partitions
    )
    path = _path(topology)
    wanted = num_replicas * num_partitions
    if wanted > len(path):
        raise ValueError(
            "`num_replicas` times `num_partitions` must be at most the number "
            f"of cores, {len(path)}. Received: {num_replicas}, "
            f"{num_partitions}."
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

    hosts = topology.device_coordinates
    return np.concatenate([sorted(host, key=place) for host in hosts])
