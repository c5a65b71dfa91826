"""Models of several replicas."""

import pytest
from keras import layers as kl
from matrix import arguments

import tfgpipe


def small():
    return [
        kl.Dense(4, activation="tanh"),
        kl.Dense(4, kernel_regularizer="l2", activity_regularizer="l1"),
        kl.Dense(2),
    ]


def replicas(layers, r, k, m=1, devices=None, **kwargs):
    """A model of R replicas of K devices."""
    with tfgpipe.PipelineStrategy(r, k, devices).scope():
        return tfgpipe.GPipe(layers, num_micro_batches=m, **kwargs)


def point(layers, r, k, m, schedule="gpipe", remat="except_last"):
    """A model for a point of the matrix of `test_transparency.py`."""
    chosen = arguments(k, m, schedule, remat)
    devices = chosen.pop("devices", None)
    width = len(devices or ()) or k
    if schedule == "written":
        width = chosen["schedule"].num_devices
    return replicas(layers, r, width, chosen.pop("num_micro_batches"), **chosen)


def refused(*parts):
    """Expects a ValueError that mentions all parts."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))
