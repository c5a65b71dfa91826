"""Strings in two languages as mini-batches for a translation model.

Rows are padded with 0 on the right, to one of few widths.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from params import names
from params.buckets import Batch, Buckets, in_order
from params.language_shares import language_shares
from params.pair_texts import READERS, PairTexts
from params.ragged import Ragged
from params.tokenizer import BOS_ID, PAD_ID


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Strings in English and other languages.

    Attributes:
        name: Where they are from: "nmt102", 102 languages.
        languages: Languages besides English; `None` for all.
        vocab_size: Most tokens of the vocabulary, which is learnt from the
            training part and shared by all languages.
        widths: Positions of a source in each bucket, ascending. Longer
            training pairs are left out, longer test pairs are cut.
        target_widths: Positions of a target in each bucket, where they differ,
            ascending, too: a width may then come more than once. A pair goes
            into the first bucket that holds it.
        temperature: T of `params.language_shares.language_shares`.
        epoch_size: Pairs that an epoch draws, about; `None` for as many as
            there are.
        to_english: Whether English is the target; else it is the source.
        source_token: Whether the model is told the source language.
    """

    name: str = "nmt102"
    languages: tuple[str, ...] | None = None
    vocab_size: int = 16000
    widths: tuple[int, ...] = (8, 16, 32, 64)
    target_widths: tuple[int, ...] | None = None
    temperature: float = 1.0
    epoch_size: int | None = None
    to_english: bool = True
    source_token: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.name not in READERS:
            problems.append(names.unknown("name", self.name, READERS))
        if self.languages is not None and not self.languages:
            problems.append(
                "`languages` must name a language, or be None for all. "
                f"Received: languages={self.languages}."
            )
        problems += self._width_problems()
        if not self.temperature >= 1:
            problems.append(
                "`temperature` must be at least 1. "
                f"Received: temperature={self.temperature}."
            )
        if self.epoch_size is not None and self.epoch_size < 1:
            problems.append(
                "`epoch_size` must be positive, or None for all pairs. "
                f"Received: epoch_size={self.epoch_size}."
            )
        if problems:
            raise ValueError("\n".join(problems))

    def _width_problems(self) -> list[str]:
        given = f"Received: widths={self.widths}"
        if self.target_widths is not None:
            given += f", target_widths={self.target_widths}"
            if len(self.widths) != len(self.target_widths):
                return [
                    f"`target_widths` must be as many as `widths`. {given}."
                ]
        buckets = self.buckets
        is_ascending = len(buckets) == len(set(buckets)) and all(
            list(part) == sorted(part) for part in zip(*buckets, strict=True)
        )
        problems = []
        if not buckets or not is_ascending:
            problems.append(f"`widths` must be ascending. {given}.")
        if any(min(bucket) < 1 for bucket in buckets):
            problems.append(f"`widths` must be positive. {given}.")
        return problems

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """Positions of source and target in each bucket."""
        targets = self.target_widths
        if targets is None:
            targets = self.widths
        return tuple(zip(self.widths, targets, strict=True))

    def source(self) -> PairSource:
        """Makes the source. The file is read when it is first asked."""
        return PairSource(self)


class PairSource(PairTexts):
    """Mini-batches of one width each, see `params.source.Source`.

    `batch_size` is in positions: a batch with sources of width v and targets of
    width w has batch_size / max(v, w) rows, rounded down. x is (source ids,
    target ids shifted right by one, `BOS_ID` first), (rows, v) and (rows, w),
    y the target ids, (rows, w), all int32.

    The sample weights are w where there is a target token and 0 elsewhere, not
    1 and 0: Keras's metrics take the mean over the positions of a row before
    they add up rows, and so every token of every batch counts the same. A loss
    with the reduction "mean_with_sample_weight" does not see the difference.

    Args:
        data: Which strings, and how they are cut.

    Attributes:
        input_spec: Specs of source and target ids, (batch, width) int32 each.
    """

    def __init__(self, data: Pairs) -> None:
        super().__init__(
            data.name,
            data.languages,
            data.vocab_size,
            max(data.buckets[-1]),
            data.to_english,
            data.source_token,
        )
        self._data = data
        self._made: dict[int, Buckets] = {}  # by batch size
        self._epoch: tuple[Any, list[Batch]] = (None, [])
        self.input_spec = _spec(None, (None, None))

    @functools.cached_property
    def _train_ids(self) -> tuple[Ragged, Ragged]:
        return self.encoded("train")

    @functools.cached_property
    def _test_ids(self) -> tuple[Ragged, Ragged]:
        return self.encoded("test")

    def _buckets(self, batch_size: int) -> Buckets:
        if batch_size not in self._made:
            self._made[batch_size] = self._make_buckets(batch_size)
        return self._made[batch_size]

    def _make_buckets(self, batch_size: int) -> Buckets:
        number = {name: i for i, name in enumerate(self.languages)}
        return Buckets(
            _lengths(self._train_ids),
            self._data.buckets,
            np.array([number[p.language] for p in self.examples("train")]),
            language_shares(
                np.array(list(self.sizes.values())), self._data.temperature
            ),
            batch_size,
            self._data.epoch_size,
        )

    def largest_batch(self, batch_size: int) -> Any:
        """Specs of a batch of the widest rows."""
        rows = max(1, batch_size // self.max_length)
        return _spec(rows, self._data.buckets[-1])

    def steps_per_epoch(self, batch_size: int) -> int:
        """Mini-batches an epoch."""
        return self._buckets(batch_size).num_batches

    def train(
        self, batch_size: int, *, seed: int, first_step: int, num_steps: int
    ) -> tf.data.Dataset:
        """Batches ((source ids, shifted target ids), target ids, weights)."""
        buckets = self._buckets(batch_size)

        def batch(step: np.ndarray) -> tuple[np.ndarray, ...]:
            epoch, index = divmod(int(step), buckets.num_batches)
            key, known = (batch_size, seed, epoch), self._epoch
            if known[0] != key:
                known = self._epoch = (key, buckets.epoch(seed, epoch))
            return arrays(self._train_ids, known[1][index])

        return _dataset(batch, first_step, num_steps)

    def evaluation(self, batch_size: int) -> tf.data.Dataset:
        """The same of the test examples, bucket by bucket."""
        planned = in_order(
            _lengths(self._test_ids), self._data.buckets, batch_size
        )
        if not planned:
            raise ValueError(
                "`languages` must have test examples. Received: "
                f"languages={self._data.languages}, which have none. Add one."
            )

        def batch(index: np.ndarray) -> tuple[np.ndarray, ...]:
            return arrays(self._test_ids, planned[int(index)])

        return _dataset(batch, 0, len(planned))


def arrays(
    ids: tuple[Ragged, Ragged], batch: Batch
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Source ids, shifted target ids, target ids and weights of a batch.

    Args:
        ids: Source and target ids of all examples.
        batch: Which examples.
    """
    source, target = (
        part.padded(batch.rows, width)
        for part, width in zip(ids, batch.widths, strict=True)
    )
    shifted = np.roll(target, 1, axis=1)
    shifted[:, 0] = BOS_ID
    is_token = target != PAD_ID
    width = np.float32(target.shape[1])
    weights = np.where(is_token, width, np.float32(0))
    weights[batch.num_counted :] = 0
    return source, np.where(is_token, shifted, PAD_ID), target, weights


def _lengths(ids: tuple[Ragged, Ragged]) -> np.ndarray:
    return np.stack([part.lengths for part in ids], axis=1)


def _spec(rows: int | None, widths: tuple[int | None, int | None]) -> Any:
    return tuple(keras.KerasTensor((rows, width), "int32") for width in widths)


def _dataset(batch: Any, first: int, last: int) -> tf.data.Dataset:
    """Calls a Python function with each number; its arrays are matrices."""
    dtypes = [tf.int32, tf.int32, tf.int32, tf.float32]

    def load(number: Any) -> Any:
        parts = tf.numpy_function(batch, [number], dtypes)
        for part in parts:
            part.set_shape([None, None])
        source, shifted, target, weights = parts
        return (source, shifted), target, weights

    return tf.data.Dataset.range(first, last).map(load).prefetch(2)
