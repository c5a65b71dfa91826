"""Changes to images: which, how many, and that seeds decide."""

import numpy as np
import pytest

from models import augmentation

IMAGES = np.random.default_rng(0).integers(1, 256, (400, 6, 5, 3), "uint8")


def flipped(images, **kwargs):
    return augmentation.horizontal_flip(images, kwargs.get("seed", (1, 2)))


def cut(images, seed=(1, 2), size=3, **kwargs):
    return augmentation.cutout(images, seed, size=size, **kwargs)


def test_half_of_the_images_are_mirrored_whole():
    found = flipped(IMAGES).numpy()
    same = (found == IMAGES).all(axis=(1, 2, 3))
    mirrored = (found == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (same ^ mirrored).all()
    assert 150 < same.sum() < 250  # 5 standard deviations


@pytest.mark.parametrize("size", [1, 3, 4])
def test_square_is_filled_and_the_rest_is_kept(size):
    found = cut(IMAGES, size=size).numpy()
    changed = found != IMAGES
    assert (found[changed] == 0).all()
    assert (changed.all(axis=-1) == changed.any(axis=-1)).all()
    for hole in changed.any(axis=-1):
        rows, columns = hole.any(axis=1), hole.any(axis=0)
        np.testing.assert_array_equal(hole, np.outer(rows, columns))
        for side in (rows, columns):
            (filled,) = side.nonzero()
            assert 1 <= len(filled) <= size
            assert (np.diff(filled) == 1).all()
            is_cut_off = filled[0] == 0 or filled[-1] == len(side) - 1
            assert len(filled) == size or is_cut_off


@pytest.mark.parametrize("change", [flipped, cut])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_change_follows_from_the_seed_and_keeps_the_dtype(change, dtype):
    images = IMAGES.astype(dtype)
    found = change(images, seed=(3, 4))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, change(images, seed=(3, 4)))
    for other in ((3, 5), (4, 4)):
        assert (found.numpy() != change(images, seed=other).numpy()).any()
