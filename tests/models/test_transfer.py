"""A new classifier on what was trained."""

import numpy as np
from keras import layers as kl
from stacks import call

import tfgpipe
from models import transfer


def data(classes, rows=16):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)), rng.integers(0, classes, rows)


def fitted(layers, classes):
    model = tfgpipe.GPipe(layers, devices=["CPU:0", "CPU:1"])
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*data(classes), batch_size=8, verbose=0)
    return model


def trained():
    layers = [
        kl.Dense(6, "relu"),
        kl.BatchNormalization(momentum=0.5),
        kl.Dropout(0.2),
        kl.Dense(5, "softmax"),
    ]
    return fitted(layers, 5)


def copied(layers):
    return [w for layer in layers for w in layer.get_weights()]


def test_all_but_the_classifier_is_kept():
    old = trained()
    classifier = kl.Dense(3, "softmax", name="new")
    new = transfer.replace_classifier(old.layers, classifier)
    assert [type(a) for a in new] == [type(b) for b in old.layers]
    assert new[-1] is classifier
    for a, b in zip(copied(new[:-1]), copied(old.layers[:-1]), strict=True):
        np.testing.assert_array_equal(a, b)
    moving_mean = new[1].get_weights()[2]
    assert np.abs(moving_mean).max() > 0
    x, _ = data(3)
    np.testing.assert_array_equal(call(new[:-1], x), call(old.layers[:-1], x))
    assert call(new, x).shape == (16, 3)
