"""Running text in windows: no token is lost, none is padded."""

import numpy as np
import pytest
import texts

from params import text
from params.text import Text

LENGTH, BATCH = 16, 4


@pytest.fixture
def source(monkeypatch, tmp_path):
    texts.use(monkeypatch, tmp_path)
    return Text(vocab_size=300, length=LENGTH).source()


def epoch(source, number=0, batch_size=BATCH):
    per_epoch = source.steps_per_epoch(batch_size)
    first = number * per_epoch
    return [
        (x.numpy(), y.numpy())
        for x, y in source.train(
            batch_size, seed=5, first_step=first, num_steps=first + per_epoch
        )
    ]


def test_epoch_takes_windows_that_join_to_the_stream(source):
    rows = np.concatenate([x for x, _ in epoch(source)])
    stream = source.train_stream
    starts = []
    for row in rows:
        (found,) = [
            i
            for i in range(len(stream) - LENGTH)
            if (stream[i : i + LENGTH] == row).all()
        ]
        starts.append(found)
    offset = min(starts)
    assert offset < LENGTH
    expected = offset + LENGTH * np.arange(len(rows))
    assert sorted(starts) == expected.tolist()
    assert len(stream) - expected[-1] - LENGTH < 2 * LENGTH


def test_every_test_token_counts_once(source):
    counted = []
    for x, y, weights in source.evaluation(3):
        assert x.shape == y.shape == weights.shape
        assert set(np.unique(weights)) <= {0, 1}
        counted += [y.numpy()[i] for i in zip(*np.nonzero(weights))]
    assert counted == source.test_stream[1:].tolist()
    assert len(counted) == source.num_test_tokens


@pytest.mark.parametrize("length", [2, 3, 7, 16])
@pytest.mark.parametrize("num_tokens", [2, 3, 7, 8, 16, 17, 18, 40])
def test_windows_cover_streams_of_any_length(length, num_tokens):
    stream = np.arange(1, num_tokens + 1, dtype=np.int32)
    counted = []
    for x, y, weights in text._test_windows(stream, length):
        assert len(x) == len(y) == len(weights) == length
        for position in np.nonzero(weights)[0]:
            assert y[position] == x[position] + 1
            assert position >= length // 2 or len(counted) < length
            counted.append(y[position])
    assert counted == stream[1:].tolist()
