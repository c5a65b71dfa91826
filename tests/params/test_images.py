"""Images: classes and examples that are kept, and how they are varied."""

import numpy as np
import pytest

from params import datasets
from params.datasets import ImageDataset
from params.images import Images


@pytest.fixture(autouse=True)
def noise(monkeypatch):
    rng = np.random.default_rng(0)
    x = 0.5 + rng.random((60, 8, 8, 1), np.float32)
    y = np.arange(60, dtype=np.int32) % 4
    data = ImageDataset(x, y, x[:20], y[:20])
    monkeypatch.setitem(datasets.LOADERS, "noise", lambda: data)
    return data


def epoch(source, seed=0):
    made = source.train(
        10, seed=seed, first_step=0, num_steps=source.steps_per_epoch(10)
    )
    return [(x.numpy(), y.numpy()) for x, y in made]


def test_classes_are_kept_and_numbered_anew(noise):
    data = Images("noise", classes=(3, 1)).source().data
    for x, y, all_x, all_y in (
        (data.x_train, data.y_train, noise.x_train, noise.y_train),
        (data.x_test, data.y_test, noise.x_test, noise.y_test),
    ):
        np.testing.assert_array_equal(x[y == 0], all_x[all_y == 3])
        np.testing.assert_array_equal(x[y == 1], all_x[all_y == 1])
        assert set(y.tolist()) == {0, 1}
        assert y.dtype == np.int32


def test_flip_mirrors_some_images(noise):
    plain = epoch(Images("noise").source())
    varied = epoch(Images("noise", flip=True).source())
    mirrored = 0
    for (x, y), (x_varied, y_varied) in zip(plain, varied, strict=True):
        np.testing.assert_array_equal(y, y_varied)
        for before, after in zip(x, x_varied, strict=True):
            same = (before == after).all()
            assert same or (before[:, ::-1] == after).all()
            mirrored += not same
    assert 15 <= mirrored <= 45


def test_cutout_blanks_a_square_in_every_image(noise):
    for x, _ in epoch(Images("noise", cutout=3).source()):
        blank = (x == 0).sum(axis=(1, 2, 3))
        assert blank.min() > 0
        assert blank.max() <= 9


def test_test_images_are_not_varied(noise):
    source = Images("noise", flip=True, cutout=3).source()
    found = np.concatenate([x for x, _ in source.evaluation(6)])
    np.testing.assert_array_equal(found, noise.x_test)
