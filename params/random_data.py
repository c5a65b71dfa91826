"""Random numbers of the shapes of data sets that do not come with the source.

For speed and memory, which do not depend on what is in the data. Nothing can be
learnt from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import tensorflow as tf

from params.batches import steps_per_epoch
from params.tokenizer import BOS_ID

_FIRST_TOKEN = 4  # after the special ones


@dataclasses.dataclass(frozen=True)
class RandomImages:
    """Images and classes.

    Attributes:
        size: Height and width, pixels.
        num_classes: Number of classes.
        num_examples: Images an epoch. ImageNet has 1,281,167.
    """

    name: ClassVar[str] = "random images"
    size: int = 224
    num_classes: int = 1000
    num_examples: int = 1_281_167

    def source(self) -> RandomSource:
        """Makes the source."""
        shape = (self.size, self.size, 3)

        def draw(rows: int, seed: Any) -> Any:
            x = tf.random.stateless_uniform((rows, *shape), seed)
            y = tf.random.stateless_uniform(
                [rows], seed, 0, self.num_classes, tf.int32
            )
            return x, y

        spec = keras.KerasTensor((None, *shape), "float32")
        return RandomSource(draw, spec, self.num_examples)


@dataclasses.dataclass(frozen=True)
class RandomTokens:
    """Tokens for a language model.

    Attributes:
        length: Tokens in an example.
        vocab_size: Tokens are below.
        num_examples: Examples an epoch.
    """

    name: ClassVar[str] = "random tokens"
    length: int = 1024
    vocab_size: int = 32000
    num_examples: int = 32000

    def source(self) -> RandomSource:
        """Makes the source."""

        def draw(rows: int, seed: Any) -> Any:
            shape = (rows, self.length + 1)
            tokens = _tokens(shape, seed, self.vocab_size)
            return tokens[:, :-1], tokens[:, 1:]

        spec = keras.KerasTensor((None, self.length), "int32")
        return RandomSource(draw, spec, self.num_examples)


@dataclasses.dataclass(frozen=True)
class RandomPairs:
    """Sources and targets for translation, all of one length.

    Batches are measured in positions, as those of `params.pairs.Pairs`.

    Attributes:
        length: Tokens in a source, and in a target.
        vocab_size: Tokens are below.
        num_examples: Pairs an epoch.
    """

    name: ClassVar[str] = "random pairs"
    length: int = 64
    vocab_size: int = 64000
    num_examples: int = 1_000_000

    def source(self) -> RandomSource:
        """Makes the source."""

        def draw(rows: int, seed: Any) -> Any:
            shape = (rows, 2 * self.length)
            tokens = _tokens(shape, seed, self.vocab_size)
            source, target = tokens[:, : self.length], tokens[:, self.length :]
            first = tf.fill([rows, 1], BOS_ID)
            shifted = tf.concat([first, target[:, :-1]], axis=1)
            return (source, shifted), target, tf.ones_like(target, tf.float32)

        spec = keras.KerasTensor((None, self.length), "int32")
        return RandomSource(
            draw, (spec, spec), self.num_examples, positions=self.length
        )


def _tokens(shape: tuple[int, int], seed: Any, vocab_size: int) -> tf.Tensor:
    return tf.random.stateless_uniform(
        shape, seed, _FIRST_TOKEN, vocab_size, tf.int32
    )


class RandomSource:
    """Mini-batches of random numbers, see `params.source.Source`.

    Args:
        draw: Makes a batch of so many rows from a seed of two numbers.
        input_spec: Specs of the inputs.
        num_examples: Examples an epoch.
        positions: What an example counts in `batch_size`.

    Attributes:
        input_spec: As given.
    """

    def __init__(
        self,
        draw: Callable[[int, Any], Any],
        input_spec: Any,
        num_examples: int,
        positions: int = 1,
    ) -> None:
        self.input_spec = input_spec
        self._draw = draw
        self._num_examples = num_examples
        self._positions = positions

    def _rows(self, batch_size: int) -> int:
        return max(1, batch_size // self._positions)

    def largest_batch(self, batch_size: int) -> Any:
        """Specs of a mini-batch; all are alike."""
        rows = self._rows(batch_size)
        return keras.tree.map_structure(
            lambda spec: keras.KerasTensor((rows, *spec.shape[1:]), spec.dtype),
            self.input_spec,
        )

    def steps_per_epoch(self, batch_size: int) -> int:
        """Mini-batches an epoch; the last one is a full one, too."""
        return steps_per_epoch(self._num_examples, self._rows(batch_size))

    def train(
        self, batch_size: int, *, seed: int, first_step: int, num_steps: int
    ) -> tf.data.Dataset:
        """Batches that are drawn from the seed and the step."""
        rows = self._rows(batch_size)

        def batch(step: Any) -> Any:
            return self._draw(rows, tf.stack([tf.cast(seed, step.dtype), step]))

        return tf.data.Dataset.range(first_step, num_steps).map(batch)

    def evaluation(self, batch_size: int) -> tf.data.Dataset:
        """One batch."""
        return self.train(batch_size, seed=-1, first_step=0, num_steps=1)
