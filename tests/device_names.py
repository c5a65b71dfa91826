"""The devices that tests cut from a GPU, or from the CPU; see `conftest.py`."""

import tensorflow as tf


def names(count):
    """The first ones."""
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    return [f"{kind}:{i}" for i in range(count)]
