"""The data sets that experiments name, as arrays.

>>> load("fashion_mnist_12k").x_train.shape
(12000, 28, 28, 1)
"""

import gzip
import pathlib
import struct
import zipfile
import zlib
from typing import NamedTuple

import numpy as np

from params import names

SHIPPED = pathlib.Path(__file__).resolve().parent.parent / "data"
DEBIAN = pathlib.Path("/usr/share/datasets/fashion-mnist")

_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_IDX_UINT8 = 8  # the element type in an IDX file's magic number


class ImageDataset(NamedTuple):
    """Images and their classes, for training and for testing.

    Attributes:
        x_train: (examples, height, width, channels), float32 from 0 to 1.
        y_train: (examples,), int32, classes from 0.
        x_test: Like `x_train`.
        y_test: Like `y_train`.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(name: str) -> ImageDataset:
    """Reads a data set.

    Args:
        name: `"fashion_mnist_12k"`, 12,000 + 2,000 images that come with the
            source, or `"fashion_mnist_full"`, the 60,000 + 10,000 of Debian's
            package `dataset-fashion-mnist`.

    Raises:
        ValueError: If there is no such data set, or a file is not what it
            should be.
        FileNotFoundError: If a file is missing.
    """
    if name not in LOADERS:
        raise ValueError(names.unknown("data", name, LOADERS))
    return LOADERS[name]()


def fashion_mnist_12k(
    path: pathlib.Path = SHIPPED / "fashion12k2k.npz",
) -> ImageDataset:
    """Reads the subset of Fashion-MNIST that comes with the source."""
    cure = "Restore it: git checkout -- data"
    _check_is_file(path, cure)
    arrays_of = ImageDataset._fields
    try:
        with path.open("rb") as content, np.load(content) as file:
            arrays = [file[name] for name in arrays_of]
    except _UNREADABLE as error:
        raise ValueError(
            f"`path` must be a whole .npz file with the arrays {arrays_of}. "
            f"Received: path={str(path)!r}, of which reading failed with: "
            f"{error}. {cure}"
        ) from error
    return _image_dataset(path, cure, *arrays)


def fashion_mnist_full(folder: pathlib.Path = DEBIAN) -> ImageDataset:
    """Reads all of Fashion-MNIST, as Debian installs it."""
    arrays = [
        read_idx(folder / f"{part}-{content}-ubyte.gz")
        for part in ("train", "t10k")
        for content in ("images-idx3", "labels-idx1")
    ]
    return _image_dataset(folder, _INSTALL, *arrays)


LOADERS = {
    "fashion_mnist_12k": fashion_mnist_12k,
    "fashion_mnist_full": fashion_mnist_full,
}

_INSTALL = (
    "Install Debian's package dataset-fashion-mnist, or use the data set "
    "'fashion_mnist_12k'."
)


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads a gzipped IDX file of bytes, the format of MNIST.

    Args:
        path: The file.

    Raises:
        ValueError: If it is not gzipped, not IDX, not of bytes, or not whole.
        FileNotFoundError: If it is missing.

    Reference: [the format](http://yann.lecun.com/exdb/mnist/)
    """
    _check_is_file(path, _INSTALL)
    try:
        with gzip.open(path) as file:
            content = file.read()
        zeros, kind, rank = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{rank}I", content, offset=4)
    except _UNREADABLE as error:
        raise ValueError(
            "`path` must be a whole gzipped IDX file. Received: "
            f"path={str(path)!r}, of which reading failed with: {error}. "
            f"{_INSTALL}"
        ) from error
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if zeros or kind != _IDX_UINT8 or values.size != np.prod(shape, dtype=int):
        raise ValueError(
            "`path` must be an IDX file of bytes, as many as its header says. "
            f"Expected the element type {_IDX_UINT8} and {shape} values. "
            f"Received: path={str(path)!r} with the element type {kind} and "
            f"{values.size} values. {_INSTALL}"
        )
    return values.reshape(shape)


def _check_is_file(path: pathlib.Path, cure: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"`path` must be a file. Received: path={str(path)!r}, which does "
            f"not exist. {cure}"
        )


def _image_dataset(
    path: pathlib.Path,
    cure: str,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
) -> ImageDataset:
    """Checks the arrays, scales the images and gives them a channel."""
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        right = x.ndim == 3 and x.dtype == np.uint8 and y.shape == x.shape[:1]
        if not right or not len(x):
            raise ValueError(
                "`path` must hold images (examples, height, width) of uint8 "
                "and as many classes (examples,). Received: "
                f"path={str(path)!r} with x_{part} {x.shape} of {x.dtype} and "
                f"y_{part} {y.shape}. {cure}"
            )
    return ImageDataset(
        _scaled(x_train),
        y_train.astype(np.int32),
        _scaled(x_test),
        y_test.astype(np.int32),
    )


def _scaled(images: np.ndarray) -> np.ndarray:
    return images[..., np.newaxis].astype(np.float32) / np.float32(255)
