"""How often each language is trained on, by temperature.

References:

- [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 5
- [Arivazhagan et al., 2019](https://arxiv.org/abs/1907.05019), section 4.2
"""

import numpy as np


def language_shares(sizes: np.ndarray, temperature: float) -> np.ndarray:
    """Shares of the training examples, p_l ~ (n_l / sum n)^(1 / T).

    Args:
        sizes: (languages,), n_l: examples of each. Positive.
        temperature: T. At 1, languages have the shares of their data; the
            higher it is, the more equal they are. At least 1.

    Raises:
        ValueError: If a language is empty or the temperature is below 1.

    Example:

    >>> language_shares(np.array([900, 100]), temperature=2.0)
    array([0.75, 0.25])
    """
    sizes = np.asarray(sizes, np.float64)
    if not sizes.size or sizes.min() <= 0:
        raise ValueError(
            "`sizes` must be positive: every language needs an example. "
            f"Received: sizes={sizes.tolist()}."
        )
    if not temperature >= 1:
        raise ValueError(
            "`temperature` must be at least 1. "
            f"Received: temperature={temperature}."
        )
    powers = (sizes / sizes.sum()) ** (1 / temperature)
    return powers / powers.sum()
