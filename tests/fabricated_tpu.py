"""TPUs that are not there."""

from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from tensorflow.python.tpu import tpu_system_metadata

REAL = tf.config.list_logical_devices


def topology(x, y, z, cores, hosts=(1, 1, 1)):
    """A mesh of chips; hosts have equal parts of it, with those numbers."""
    sizes = [size // n for size, n in zip((x, y, z), hosts)]
    by_host = {}
    for index in np.ndindex(z, y, x, cores):
        chip = index[2::-1]
        host = tuple(c // size for c, size in zip(chip, sizes))[::-1]
        by_host.setdefault(host, []).append([*chip, index[3]])
    return tf.tpu.experimental.Topology(
        mesh_shape=[x, y, z, cores],
        device_coordinates=[by_host[host] for host in sorted(by_host)],
    )


TPUS = {  # by how Google Cloud calls them
    "v2-8": topology(2, 2, 1, 2),
    "v3-32": topology(4, 4, 1, 2, hosts=(2, 2, 1)),
    "v4-16": topology(2, 2, 2, 1, hosts=(1, 1, 2)),
    "v4-128": topology(4, 4, 4, 1, hosts=(2, 2, 4)),
    "v5e-8": topology(2, 4, 1, 1),
    "odd": topology(3, 3, 3, 1),
}


def list_cores(monkeypatch):
    """TensorFlow lists the cores of a v2-8, as on its TPU VM."""
    cores = [
        tf.config.LogicalDevice(
            f"/job:localhost/replica:0/task:0/device:TPU:{i}", "TPU"
        )
        for i in range(8)
    ]

    def listed(kind=None):
        if kind == "TPU":
            return cores
        return REAL(kind) + ([] if kind else cores)

    monkeypatch.setattr(tf.config, "list_logical_devices", listed)


def tensorflows_strategy(assignment=None):
    """A `TPUStrategy` of a v2-8 whose cores are listed, see `list_cores`."""

    class Resolver:
        def get_tpu_system_metadata(self):
            return tpu_system_metadata.TPUSystemMetadata(
                num_cores=8,
                num_hosts=1,
                num_of_cores_per_host=8,
                topology=TPUS["v2-8"],
                devices=[
                    SimpleNamespace(name=d.name)
                    for d in tf.config.list_logical_devices("TPU")
                ],
            )

    return tf.distribute.TPUStrategy(
        Resolver(), experimental_device_assignment=assignment
    )
