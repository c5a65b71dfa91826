"""What samplers draw, for groups of prompts as for all of them at once.

A sampler of KerasHub draws for all rows in each turn of its loop, and moves its
seed on. A group does as well, and keeps its own rows of it:

    seed of turn s = seed at the start + s
    drawn for all rows, of which group m takes its own

so that tokens do not depend on groups. A seed that each loop moves on would
also make TensorFlow run the loops one after the other: here it is moved on
once, at the end, by the turns of the longest loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals

_categorical = internals.Replaceable(keras.random, "categorical")


class Draws:
    """The draws of a sampler in one call of `generate`.

    `num_rows` are the prompts of all groups; `start` is the position of the
    first token that is generated, if tasks ask for the one behind the shortest
    prompt.

    Attributes:
        index: The position of the token of this turn.
    """

    def __init__(self, sampler: Any, num_rows: int, start: tf.Tensor):
        generators = [
            value
            for value in vars(sampler).values()
            if isinstance(value, keras.random.SeedGenerator)
        ]
        self._base = [(g, tf.identity(g.state.value)) for g in generators]
        self._num_rows = num_rows
        self._start = start
        self._begins: list[Any] = []
        self._turns: list[tf.Tensor] = []
        self.index: Any = None

    @contextlib.contextmanager
    def of_rows(self, first: int, last: int) -> Iterator[None]:
        """Inside, a group of rows draws."""

        def categorical(
            logits: Any,
            num_samples: int,
            dtype: Any = "int32",
            seed: Any = None,
        ) -> Any:
            base = next((b for g, b in self._base if g is seed), None)
            if base is None:
                return _categorical.original(logits, num_samples, dtype, seed)
            turn = tf.cast(self.index - self._start, base.dtype)
            # (own rows, ids) -> (all rows, ids): what a row draws depends on
            # how many there are. So all draw, and the group's are taken.
            paddings = [[first, self._num_rows - last], [0, 0]]
            drawn = _categorical.original(
                tf.pad(logits, paddings),
                num_samples,
                dtype,
                _Known(base + tf.stack([0 * turn, turn])),
            )
            return drawn[first:last]

        with _categorical.by(categorical):
            yield

    def begin(self, index: Any) -> Any:
        """Where a group begins that would begin at `index` by itself."""
        if not isinstance(index, tf.Tensor):  # the same for all groups
            self._start = tf.convert_to_tensor(index, tf.int32)
        self._begins.append(tf.cast(index, tf.int32))
        return self._start

    def note_end(self, index: tf.Tensor) -> None:
        """Notes the position at which a group's loop has ended."""
        self._turns.append(tf.cast(index, tf.int32) - self._start)

    def move_on(self) -> None:
        """Moves the seeds on, as one loop over all rows would."""
        tf.debugging.assert_equal(
            tf.reduce_min(tf.stack(self._begins)),
            self._start,
            "A task must begin to generate behind its shortest prompt, if "
            "prompts go through in several groups. Pass num_groups=1.",
        )
        for generator, base in self._base:
            turns = tf.cast(tf.reduce_max(tf.stack(self._turns)), base.dtype)
            generator.state.assign(base + tf.stack([0 * turns, turns]))


class _Known(keras.random.SeedGenerator):
    """A seed that is known."""

    def __init__(self, value: tf.Tensor):
        self.__dict__["known"] = value

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self.__dict__["known"]
