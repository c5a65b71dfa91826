"""FLOPs of what layers are made of, for one example.

The layers' `flops` methods add these up. A multiply-add counts as 2, any other
arithmetic operation, comparison or selection on an element as 1; roots,
exponentials and other transcendental functions, look-ups and copies count as 0.
That is how XLA's cost analysis counts. The forward pass is that of inference:
no dropout, and moving statistics in batch normalizations.

A size that is unknown (`None`) counts as 1.
"""

import math
from collections.abc import Sequence

# Operations on an element, beside the matrix products.
_LAYER_NORM = 9
_SOFTMAX = 6  # scale, mask, maximum, difference, sum, quotient
_BATCH_NORM = 2


def size(shape: Sequence[int | None]) -> int:
    """Elements of one example.

    Args:
        shape: (batch, ...); what the batch is does not matter.

    Returns:
        The product of the other sizes.

    Example:

    >>> size((None, 3, None, 5))
    15
    """
    return math.prod(1 if n is None else n for n in shape[1:])


def dense(positions: int, inputs: int, outputs: int) -> float:
    """A dense layer with a bias.

    Args:
        positions: How often it is applied.
        inputs: Units that it reads.
        outputs: Units that it returns.

    Returns:
        FLOPs.

    Example:

    >>> dense(1, 3, 5)
    35.0
    """
    return float(positions * outputs * (2 * inputs + 1))


def layer_norm(elements: int) -> float:
    """A layer normalization of so many elements."""
    return float(_LAYER_NORM * elements)


def attention(queries: int, keys: int, num_heads: int, head_dim: int) -> float:
    """Dot-product attention without its projections.

    Args:
        queries: Positions that attend.
        keys: Positions that they attend to; all of them are counted, also
            those that a mask hides.
        num_heads: Heads.
        head_dim: Units of each.

    Returns:
        FLOPs.
    """
    scores = queries * keys * num_heads
    return float(scores * (2 * 2 * head_dim + _SOFTMAX))


def convolution(
    output: Sequence[int | None], window: Sequence[int], channels: int
) -> float:
    """A convolution without bias.

    Args:
        output: Its output's shape (batch, height, width, filters).
        window: Height and width of the kernel.
        channels: Channels that it reads.

    Returns:
        FLOPs.
    """
    return float(2 * size(output) * math.prod(window) * channels)


def batch_norm(elements: int) -> float:
    """A batch normalization of so many elements, with known moments."""
    return float(_BATCH_NORM * elements)


def pooling(output: Sequence[int | None], window: Sequence[int]) -> float:
    """A pooling.

    Args:
        output: Its output's shape (batch, height, width, channels).
        window: Height and width of what it pools.

    Returns:
        FLOPs.
    """
    return float(size(output) * math.prod(window))
