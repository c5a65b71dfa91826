"""Files that earlier releases wrote are loaded for ever.

`golden/make.py` wrote them, by the release after which their folder is named.
"""

import importlib.util
import pathlib
import shutil

import keras
import numpy as np
import pytest

import tfgpipe

FOLDER = pathlib.Path(__file__).parent.parent / "golden"
RELEASES = sorted(path.parent.name for path in FOLDER.glob("*/numbers.npz"))
_spec = importlib.util.spec_from_file_location("golden", FOLDER / "make.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


@pytest.fixture(params=RELEASES)
def written(request, tmp_path):
    """The folder of a release, and what its numbers were."""
    folder = tmp_path / request.param
    shutil.copytree(FOLDER / request.param, folder)
    with np.load(folder / "numbers.npz") as numbers:
        return folder, dict(numbers)


def assert_outputs(model, numbers):
    found = model.predict(golden.data()[0], verbose=0)
    np.testing.assert_allclose(found, numbers["outputs"], atol=1e-6)


def assert_losses(model, numbers):
    found = golden.train(model, 2, first=1)
    np.testing.assert_allclose(found, numbers["losses"], rtol=1e-5)


def test_there_is_a_release():
    assert RELEASES


def test_model_of_a_release_is_loaded_and_trained(written):
    folder, numbers = written
    model = keras.saving.load_model(folder / "model.keras")
    assert isinstance(model, tfgpipe.GPipe)
    assert_outputs(model, numbers)
    assert_losses(model, numbers)


@pytest.mark.parametrize("k", [1, 2])
def test_weights_of_a_release_are_loaded(written, k):
    folder, numbers = written
    model = golden.model(num_partitions=k)
    model.load_weights(folder / "model.weights.h5")
    assert_outputs(model, numbers)


@pytest.mark.parametrize("k", [1, 2])
def test_checkpoint_of_a_release_is_restored_and_goes_on(written, k):
    folder, numbers = written
    model = golden.model(num_partitions=k)
    assert tfgpipe.restore(model, folder / "checkpoint").epoch == 1
    assert_outputs(model, numbers)
    assert_losses(model, numbers)
