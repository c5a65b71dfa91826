"""Tensors that travel as one come out as they went in."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tfgpipe.graphs.bundle import Bundle

DTYPES = ["float32", "int32", "bool", "float64", "string", "bfloat16"]


def values(dtypes):
    return [
        tf.constant(["a", "b"]) if d == "string" else tf.cast([i, 1], d)
        for i, d in enumerate(dtypes)
    ]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("num", range(len(DTYPES) + 1))
def test_values_come_out_in_their_order(num, together):
    tensors = values(DTYPES[:num])
    bundle = Bundle(tensors, together)
    packed = bundle.pack(tensors)
    assert len(packed) == len(bundle.specs)
    for tensor, spec in zip(packed, bundle.specs):
        assert spec.is_compatible_with(tensor)
    found = bundle.unpack(packed)
    assert [t.dtype for t in found] == [t.dtype for t in tensors]
    for a, b in zip(found, tensors):
        np.testing.assert_array_equal(a, b)


def test_what_is_noted_of_the_types_is_forgotten():
    """Else each call that takes it takes TensorFlow time to add to a graph."""

    @tf.function
    def packed():
        tensors = [tf.zeros([i + 1]) for i in range(3)]
        (one,) = Bundle(tensors, together=True).pack(tensors)
        plain = tf.raw_ops.OptionalFromValue(components=tensors)
        noted.extend(handle_data_util.get_handle_data(t) for t in (plain, one))

    noted = []
    packed()
    assert noted[0].is_set
    assert noted[1] is None or not noted[1].is_set


def test_nothing_is_copied():
    tensors = [tf.random.stateless_normal([64], [0, i]) for i in range(3)]
    bundle = Bundle(tensors, together=True)
    found = bundle.unpack(bundle.pack(tensors))
    assert [address(t) for t in found] == [address(t) for t in tensors]


def address(tensor):
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return np.from_dlpack(_Exported(capsule)).__array_interface__["data"][0]


class _Exported:
    """What NumPy takes memory from."""

    def __init__(self, capsule):
        self._capsule = capsule

    def __dlpack__(self, **kwargs):
        return self._capsule

    def __dlpack_device__(self):
        return 1, 0  # the CPU
