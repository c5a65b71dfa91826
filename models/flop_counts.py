"""FLOPs of what layers are made of, for one example.

The layers' `flops` methods add these up. A multiply-add counts as 2, any other
arithmetic operation, comparison or selection on an element as 1; roots,
exponentials and other transcendental functions and copies count as 0; products
with padding are left out. That is how XLA's cost analysis counts. The forward
pass is that of inference: no dropout, and moving statistics in batch
normalizations.

A size that is unknown (`None`) counts as 1.
"""

import math
from collections.abc import Sequence

# Operations on an element, beside the matrix products.
_LAYER_NORM = 10
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
    shape: Sequence[int | None],
    filters: int,
    window: Sequence[int],
    strides: Sequence[int],
) -> float:
    """A convolution without bias, whose padding is "same".

    Args:
        shape: Shape of its input (batch, height, width, channels).
        filters: Channels of its output.
        window: Height and width of the kernel.
        strides: Its strides, both ways.

    Returns:
        FLOPs.

    Example:

    >>> convolution((None, 1, 5, 2), 3, (1, 3), (1, 1)) == 2 * (
    ...     3 * 5 - 2
    ... ) * 2 * 3
    True
    """
    *sizes, channels = shape[1:]
    products = math.prod(map(_products, sizes, window, strides))
    return float(2 * products * channels * filters)


def _products(size: int | None, window: int, stride: int) -> int:
    """How often a window's element meets one of the image, along an axis."""
    size = 1 if size is None else size
    num_windows = -(-size // stride)
    padding = max((num_windows - 1) * stride + window - size, 0)
    firsts = (i * stride - padding // 2 for i in range(num_windows))
    return sum(min(first + window, size) - max(first, 0) for first in firsts)


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
