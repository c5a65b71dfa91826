"""The data sets: what they hold, and the errors of damaged files."""

import gzip
import struct

import numpy as np
import pytest

from params import datasets


def write_idx(path, array, kind=8):
    header = struct.pack(">HBB", 0, kind, array.ndim)
    header += struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def idx_folder(tmp_path):
    """A folder like Debian's, with 5 + 3 images of 4 x 4 pixels."""
    for part, n in (("train", 5), ("t10k", 3)):
        images = np.arange(n * 16, dtype=np.uint8).reshape((n, 4, 4))
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        labels = np.arange(n, dtype=np.uint8)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path


def test_shipped_subset_is_whole():
    data = datasets.load("fashion_mnist_12k")
    assert data.x_train.shape == (12_000, 28, 28, 1)
    assert data.x_test.shape == (2_000, 28, 28, 1)
    assert data.x_train.dtype == np.float32
    assert data.y_train.dtype == np.int32
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    counts = np.bincount(data.y_train)
    assert (len(counts), counts.min(), counts.max()) == (10, 1_122, 1_244)
    assert len(data.y_train) == 12_000
    assert len(data.y_test) == 2_000


def test_idx_folder_gives_images_and_classes(idx_folder):
    data = datasets.fashion_mnist_full(idx_folder)
    assert data.x_train.shape == (5, 4, 4, 1)
    assert data.x_test.shape == (3, 4, 4, 1)
    np.testing.assert_array_equal(data.y_train, np.arange(5))
    np.testing.assert_allclose(data.x_train[1, 0, 1, 0], 17 / 255)


def test_full_set_not_installed_names_the_package(tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist"):
        datasets.fashion_mnist_full(tmp_path)


def test_damaged_subset_is_an_error(tmp_path):
    content = bytearray((datasets.SHIPPED / "fashion12k2k.npz").read_bytes())
    content[2_000_000:2_000_100] = bytes(100)
    path = tmp_path / "damaged.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"whole \.npz file"):
        datasets.fashion_mnist_12k(path)


def test_truncated_idx_file_is_an_error(idx_folder):
    path = idx_folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="whole gzipped IDX file"):
        datasets.fashion_mnist_full(idx_folder)
