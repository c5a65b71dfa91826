"""Temperature: from the shares of the data to equal ones."""

import numpy as np
import pytest

from params.language_shares import language_shares

SIZES = np.array([22120, 1000, 19])


def test_shares_are_powers_of_the_sizes():
    shares = language_shares(SIZES, 5.0)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] / shares[2] == pytest.approx((22120 / 19) ** 0.2)


@pytest.mark.parametrize(
    ("sizes", "temperature", "message"),
    [
        ([3, 0], 1.0, "every language needs an example"),
        ([], 1.0, "`sizes` must be positive"),
        ([3], 0.5, "`temperature` must be at least 1"),
        ([3], float("nan"), "`temperature` must be at least 1"),
    ],
)
def test_bad_arguments_are_an_error(sizes, temperature, message):
    with pytest.raises(ValueError, match=message):
        language_shares(np.array(sizes), temperature)
