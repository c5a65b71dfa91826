"""Records of layers: what is counted once."""

import keras
import numpy as np
from keras import layers as kl

import tfgpipe
from tfgpipe.profiles import kept_in_row


def test_what_neighbours_keep_is_counted_once():
    # inputs, outputs, all else
    kept = [(1, 20, 300), (4, 0, 600), (7, 50, 0)]
    assert kept_in_row(kept) == [1 + 20 + 300, 7 + 600, 50]


def test_tied_and_equal_weights_are_counted_where_they_are():
    shared = kl.Dense(4, name="shared")
    layers = [kl.Dense(4), shared, kl.ReLU(), shared, kl.Dense(4)]
    found = tfgpipe.profile(
        [keras.Input((4,)), *layers],
        np.ones((2, 4), "float32"),
        micro_batch_sizes=[2],
        seconds=1e-3,
        optimizer=None,
        verbose=0,
    )
    assert [own.weight_bytes for own in found.layers] == [80, 80, 0, 0, 80]
    assert [own.slot_bytes for own in found.layers] == [0] * 5
    assert found.optimizer == "none"
