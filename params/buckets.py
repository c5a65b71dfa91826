"""Batches of few shapes from examples of many lengths.

An example has parts, such as a source and a target, and goes into the first
bucket that is wide enough for all of them. A batch has examples of one bucket,
of all languages, and as many rows as `batch_size` positions of its widest part
allow: so there is one shape a bucket. What an epoch does follows from the seed
and its number alone.

An epoch draws from each pair of a language l and a bucket b

    p_l N n_lb / n_l

examples, rounded, where N is how many an epoch should have, n_l and n_lb are
the examples of the language and of the pair, and p_l is the language's share.
With N all examples and p_l = n_l / N each is drawn once. Of more than there
are, all are drawn before any is drawn again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """The examples of a mini-batch.

    Attributes:
        widths: Positions in a row of each part.
        rows: Indices of the examples. The last batch of a bucket is filled up
            with examples that do not count.
        num_counted: How many of the first rows count.
    """

    widths: tuple[int, ...]
    rows: np.ndarray
    num_counted: int


class Buckets:
    """Batches of examples that differ in length.

    Args:
        lengths: (examples, parts), positions of each. What no bucket holds is
            left out.
        widths: For each bucket the positions in a row of each part. The last
            bucket is the widest in all of them.
        languages: (examples,), the language of each, from 0.
        shares: (languages,), p_l of the examples of an epoch.
        batch_size: Positions in a batch, at least those of the widest row.
        epoch_size: N; `None` for the number of examples.

    Raises:
        ValueError: If the longest rows do not fit into a batch, or no example
            fits into a bucket.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        widths: Sequence[tuple[int, ...]],
        languages: np.ndarray,
        shares: np.ndarray,
        batch_size: int,
        epoch_size: int | None = None,
    ) -> None:
        if batch_size < (widest := max(widths[-1])):
            raise ValueError(
                "`batch_size` must be at least the positions of the longest "
                f"example, {widest}. Received: batch_size={batch_size}. "
                "Batches are measured in positions here."
            )
        self._widths = tuple(widths)
        self._rows = [batch_size // max(parts) for parts in widths]
        # Bucket by bucket: what to draw from, and how many examples.
        self._draws: list[list[tuple[np.ndarray, int]]] = [[] for _ in widths]
        bucket_of = _bucket_of(lengths, widths)
        inside = bucket_of < len(widths)
        total = epoch_size or int(inside.sum())
        for language, share in enumerate(shares):
            own = inside & (languages == language)
            for bucket, draws in enumerate(self._draws):
                (members,) = np.nonzero(own & (bucket_of == bucket))
                if len(members):
                    wanted = share * total * len(members) / own.sum()
                    draws.append((members, max(1, round(wanted))))
        if not inside.any():
            raise ValueError(
                "`widths` must be wide enough for some example. Received: "
                f"widths={self._widths} and no shorter example. Add a bucket."
            )

    @property
    def num_examples(self) -> int:
        """Examples that an epoch draws, those drawn twice counted twice."""
        return sum(count for draws in self._draws for _, count in draws)

    @property
    def num_batches(self) -> int:
        """Batches an epoch."""
        return sum(
            -(-sum(count for _, count in draws) // rows)
            for draws, rows in zip(self._draws, self._rows, strict=True)
        )

    def epoch(self, seed: int, number: int) -> list[Batch]:
        """The batches of an epoch, in order.

        Args:
            seed: Determines what is drawn, and the order.
            number: Of the epoch, from 0.
        """
        rng = np.random.default_rng([seed, number])
        batches = []
        for widths, num_rows, draws in zip(
            self._widths, self._rows, self._draws, strict=True
        ):
            if draws:
                drawn = [_draw(rng, *draw) for draw in draws]
                rows = rng.permutation(np.concatenate(drawn))
                batches += _cut(rows, num_rows, widths)
        return [batches[i] for i in rng.permutation(len(batches))]


def in_order(
    lengths: np.ndarray, widths: Sequence[tuple[int, ...]], batch_size: int
) -> list[Batch]:
    """Batches of every example once, bucket by bucket.

    Args:
        lengths: (examples, parts). Longer parts than those of the last bucket
            are cut.
        widths: As for `Buckets`.
        batch_size: As for `Buckets`.
    """
    bucket_of = _bucket_of(np.minimum(lengths, widths[-1]), widths)
    batches = []
    for bucket, parts in enumerate(widths):
        (rows,) = np.nonzero(bucket_of == bucket)
        if len(rows):
            batches += _cut(rows, max(1, batch_size // max(parts)), parts)
    return batches


def _bucket_of(
    lengths: np.ndarray, widths: Sequence[tuple[int, ...]]
) -> np.ndarray:
    """The bucket of each example; `len(widths)` where none holds it."""
    buckets = np.full(len(lengths), len(widths))
    for bucket in reversed(range(len(widths))):
        buckets[(lengths <= widths[bucket]).all(axis=1)] = bucket
    return buckets


def _draw(
    rng: np.random.Generator, members: np.ndarray, count: int
) -> np.ndarray:
    """Draws all members as often as possible, then some of them once more."""
    times, rest = divmod(count, len(members))
    return np.concatenate([*[members] * times, rng.permutation(members)[:rest]])


def _cut(
    rows: np.ndarray, num_rows: int, widths: tuple[int, ...]
) -> list[Batch]:
    """Batches of `num_rows`; the last one repeats what it lacks."""
    return [
        Batch(
            widths,
            np.take(rows, np.arange(start, start + num_rows), mode="wrap"),
            min(num_rows, len(rows) - start),
        )
        for start in range(0, len(rows), num_rows)
    ]
