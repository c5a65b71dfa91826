"""What every data set promises, checked on each of them."""

import keras
import numpy as np
import pytest
import texts

from params import datasets
from params.datasets import ImageDataset
from params.images import Images
from params.pairs import Pairs
from params.random_data import RandomImages, RandomPairs, RandomTokens
from params.text import Text

DATA = {
    "images": (Images("noise"), 8),
    "varied images": (Images("noise", flip=True, cutout=2), 8),
    "text": (Text(vocab_size=300, length=16), 4),
    "pairs": (Pairs(vocab_size=320, widths=(16, 32, 64)), 128),
    "few pairs": (
        Pairs(vocab_size=320, widths=(32, 64), temperature=5.0, epoch_size=50),
        128,
    ),
    "random images": (RandomImages(4, 3, num_examples=20), 8),
    "random tokens": (RandomTokens(6, 50, num_examples=20), 8),
    "random pairs": (RandomPairs(6, 50, num_examples=20), 48),
}


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(autouse=True)
def little(monkeypatch, cache_dir):
    rng = np.random.default_rng(0)
    x = rng.random((30, 6, 6, 1), np.float32)
    y = rng.integers(0, 3, 30, np.int32)
    noise = ImageDataset(x, y, x[:11], y[:11])
    monkeypatch.setitem(datasets.LOADERS, "noise", lambda: noise)
    texts.use(monkeypatch, cache_dir)


def made(name, first_step=0, num_steps=None, seed=0):
    """The elements of some steps, by default of two epochs and a bit."""
    data, batch_size = DATA[name]
    source = data.source()
    num_steps = num_steps or 2 * source.steps_per_epoch(batch_size) + 1
    found = source.train(
        batch_size, seed=seed, first_step=first_step, num_steps=num_steps
    )
    return [keras.tree.map_structure(np.asarray, element) for element in found]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        keras.tree.assert_same_structure(a, b)
        for x, y in zip(keras.tree.flatten(a), keras.tree.flatten(b)):
            np.testing.assert_array_equal(x, y)


def differ(found, other):
    return any(
        x.shape != y.shape or (x != y).any()
        for a, b in zip(found, other, strict=True)
        for x, y in zip(keras.tree.flatten(a), keras.tree.flatten(b))
    )


@pytest.mark.parametrize("name", DATA)
def test_a_resumed_run_sees_what_the_whole_run_sees(name):
    whole = made(name)
    half = len(whole) // 2
    resumed = made(name, first_step=half, num_steps=len(whole))
    assert_equal(resumed, whole[half:])


@pytest.mark.parametrize("name", DATA)
def test_order_follows_from_the_seed(name):
    assert_equal(made(name, seed=3), made(name, seed=3))
    assert differ(made(name, seed=3), made(name, seed=4))


@pytest.mark.parametrize("name", DATA)
def test_epochs_differ(name):
    whole = made(name)
    data, batch_size = DATA[name]
    per_epoch = data.source().steps_per_epoch(batch_size)
    assert differ(whole[:per_epoch], whole[per_epoch : 2 * per_epoch])


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("part", ["train", "evaluation"])
def test_inputs_are_as_the_spec_says(name, part):
    data, batch_size = DATA[name]
    source = data.source()
    if part == "train":
        found = source.train(batch_size, seed=0, first_step=0, num_steps=3)
    else:
        found = source.evaluation(batch_size)
    largest = keras.tree.flatten(source.largest_batch(batch_size))
    assert len(found) > 0
    for x, *_ in found:
        keras.tree.assert_same_structure(x, source.input_spec)
        for tensor, spec, most in zip(
            keras.tree.flatten(x),
            keras.tree.flatten(source.input_spec),
            largest,
        ):
            assert tensor.dtype.name == spec.dtype == most.dtype
            assert len(tensor.shape) == len(spec.shape)
            for size, expected in zip(tensor.shape, spec.shape):
                assert expected in (None, size)
            assert np.prod(tensor.shape) <= np.prod(most.shape)


@pytest.mark.parametrize("name", DATA)
def test_labels_belong_to_inputs_in_both_parts(name):
    data, batch_size = DATA[name]
    source = data.source()
    train = source.train(batch_size, seed=0, first_step=0, num_steps=1)
    for element in (*train, *source.evaluation(batch_size)):
        rows = keras.tree.flatten(element[0])[0].shape[0]
        assert 2 <= len(element) <= 3
        assert all(
            part.shape[0] == rows for part in keras.tree.flatten(element)
        )
