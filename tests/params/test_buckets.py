"""Batches of few shapes: how often each example is drawn, and when."""

from collections import Counter

import numpy as np
import pytest

from params.buckets import Buckets, in_order
from params.language_shares import language_shares

WIDTHS = ((4,), (8,), (16,))
BATCH_SIZE = 32
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 17, 200)
LANGUAGES = RNG.choice(3, 200, p=[0.8, 0.15, 0.05])
SIZES = np.bincount(LANGUAGES)


def make(temperature=1.0, lengths=LENGTHS, **kwargs):
    return Buckets(
        lengths[:, None],
        WIDTHS,
        LANGUAGES,
        language_shares(SIZES, temperature),
        kwargs.pop("batch_size", BATCH_SIZE),
        **kwargs,
    )


def counted(batches):
    """How often each example counts in an epoch."""
    return Counter(
        int(row) for batch in batches for row in batch.rows[: batch.num_counted]
    )


@pytest.mark.parametrize("number", [0, 1, 7])
def test_epoch_without_temperature_has_every_example_once(number):
    buckets = make()
    assert counted(buckets.epoch(0, number)) == dict.fromkeys(range(200), 1)
    assert buckets.num_examples == 200


def test_example_goes_into_the_first_bucket_that_holds_all_parts():
    lengths = np.array([(4, 4), (5, 4), (4, 5), (8, 8), (9, 1), (1, 9)])
    widths = ((4, 4), (8, 4), (8, 8), (16, 8))
    batches = Buckets(
        lengths, widths, np.zeros(6, int), np.ones(1), batch_size=16
    ).epoch(0, 0)
    found = {
        (batch.widths, int(row))
        for batch in batches
        for row in batch.rows[: batch.num_counted]
    }
    # The last example fits nowhere.
    assert found == {
        ((4, 4), 0),
        ((8, 4), 1),
        ((8, 8), 2),
        ((8, 8), 3),
        ((16, 8), 4),
    }
    assert {len(batch.rows) for batch in batches if batch.widths[0] == 8} == {2}


def test_temperature_gives_languages_their_shares():
    found = counted(make(temperature=5.0).epoch(0, 0))
    drawn = np.zeros(3)
    for row, count in found.items():
        drawn[LANGUAGES[row]] += count
    expected = 200 * language_shares(SIZES, 5.0)
    np.testing.assert_allclose(drawn, expected, rtol=0.15)


def test_test_examples_all_come_once_and_in_order():
    lengths = np.array([[3], [20], [9], [4], [16]])
    batches = in_order(lengths, WIDTHS, 16)
    assert [(*b.widths, b.rows[: b.num_counted].tolist()) for b in batches] == [
        (4, [0, 3]),
        (16, [1]),
        (16, [2]),
        (16, [4]),
    ]
