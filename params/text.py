"""Running text as mini-batches for a language model, packed without padding.

The tokens of all paragraphs are one stream, with `EOS_ID` before the first and
after each of them. It is cut into windows of one length; a window's labels are
its tokens one position later. Attention sees what stands in the window, across
the ends of paragraphs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from params import names, text_files, tokenizer
from params.batches import batch_rows, steps_per_epoch
from params.text_files import Novels
from params.tokenizer import EOS_ID, Tokenizer

READERS = {"austen": text_files.read_novels}


@dataclasses.dataclass(frozen=True)
class Text:
    """Running text in windows of tokens.

    Attributes:
        name: A text: "austen", Jane Austen's novels.
        vocab_size: Most tokens of the vocabulary, which is learnt from the
            training part.
        length: Tokens in a window. At least 2.
    """

    name: str = "austen"
    vocab_size: int = 4000
    length: int = 128

    def __post_init__(self) -> None:
        problems = []
        if self.name not in READERS:
            problems.append(names.unknown("name", self.name, READERS))
        if self.vocab_size < 1:
            problems.append(
                "`vocab_size` must be positive. "
                f"Received: vocab_size={self.vocab_size}."
            )
        if self.length < 2:
            problems.append(
                f"`length` must be at least 2. Received: length={self.length}."
            )
        if problems:
            raise ValueError("\n".join(problems))

    def source(self) -> TextSource:
        """Makes the source. The file is read when it is first asked."""
        return TextSource(self)


class TextSource:
    """Mini-batches of windows, see `params.source.Source`.

    An epoch begins somewhere in the first window, and takes every window from
    there on once, in an order of its own. Test windows begin every `length / 2`
    tokens, and only their second half counts (of the first window, all), so
    that every test token is predicted once, from at least so many before it.

    Args:
        data: Which text, and how it is cut.

    Attributes:
        input_spec: Spec of token ids (batch, length), int32.
    """

    def __init__(self, data: Text) -> None:
        self._data = data
        self.input_spec = keras.KerasTensor((None, data.length), "int32")

    @functools.cached_property
    def documents(self) -> Novels:
        """The paragraphs, for training and for testing."""
        return READERS[self._data.name]()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the training part."""
        return tokenizer.train_tokenizer(
            self.documents.train, self._data.vocab_size
        )

    @functools.cached_property
    def train_stream(self) -> np.ndarray:
        """Tokens of the training part, int32."""
        stream = self._stream(self.documents.train)
        if len(stream) < 2 * self._data.length:
            raise ValueError(
                "`length` must leave at least two windows of training text. "
                f"Received: length={self._data.length} and a text of "
                f"{len(stream)} tokens. Take shorter windows or more text."
            )
        return stream

    @functools.cached_property
    def test_stream(self) -> np.ndarray:
        """Tokens of the test part, int32."""
        return self._stream(self.documents.test)

    def _stream(self, paragraphs: Sequence[str]) -> np.ndarray:
        tokens = [EOS_ID]
        for ids in self.tokenizer.encode(paragraphs):
            tokens += [*ids, EOS_ID]
        return np.array(tokens, np.int32)

    @property
    def num_test_tokens(self) -> int:
        """Tokens that are predicted in the test part."""
        return len(self.test_stream) - 1

    @functools.cached_property
    def num_test_words(self) -> int:
        """Words of the test part, between spaces, and ends of paragraphs."""
        paragraphs = self.documents.test
        return len(paragraphs) + sum(len(p.split()) for p in paragraphs)

    def encode_prompt(self, text: str) -> np.ndarray:
        """What the model reads before it writes on: (1, tokens), int32."""
        (ids,) = self.tokenizer.encode([text])
        return np.array([[EOS_ID, *ids]], np.int32)

    def largest_batch(self, batch_size: int) -> keras.KerasTensor:
        """Spec of a full mini-batch."""
        return keras.KerasTensor((batch_size, self._data.length), "int32")

    @property
    def _num_windows(self) -> int:
        """Windows an epoch, wherever in the first one it begins."""
        length = self._data.length
        return (len(self.train_stream) - length) // length

    def steps_per_epoch(self, batch_size: int) -> int:
        """Mini-batches an epoch; the last one may be smaller."""
        return steps_per_epoch(self._num_windows, batch_size)

    def train(
        self, batch_size: int, *, seed: int, first_step: int, num_steps: int
    ) -> tf.data.Dataset:
        """Pairs of tokens and the tokens after each: (batch, length)."""
        num_windows, length = self._num_windows, self._data.length
        per_epoch = self.steps_per_epoch(batch_size)
        stream = tf.constant(self.train_stream)

        def batch(step: Any) -> tuple[Any, Any]:
            rows = batch_rows(num_windows, batch_size, seed, step)
            offset = tf.random.stateless_uniform(
                [], [seed, step // per_epoch], 0, length, tf.int32
            )
            index = (offset + rows * length)[:, tf.newaxis]
            index += tf.range(length)
            return tf.gather(stream, index), tf.gather(stream, index + 1)

        steps = tf.data.Dataset.range(first_step, num_steps)
        return steps.map(batch).prefetch(2)

    def evaluation(self, batch_size: int) -> tf.data.Dataset:
        """Tokens, those after each, and weights: 1 where a token counts."""
        windows = tuple(
            np.stack(part)
            for part in zip(
                *_test_windows(self.test_stream, self._data.length), strict=True
            )
        )
        return tf.data.Dataset.from_tensor_slices(windows).batch(batch_size)


def _test_windows(
    stream: np.ndarray, length: int
) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Windows that overlap by half, with the weights of their tokens."""
    half = length // 2
    num_labels = len(stream) - 1
    scored = 0  # labels that earlier windows count
    for start in range(0, max(num_labels - length, 0) + half, half):
        stop = min(start + length, num_labels)
        if scored >= stop:
            return
        tokens = np.zeros(length, np.int32)
        labels = np.zeros(length, np.int32)
        weights = np.zeros(length, np.float32)
        tokens[: stop - start] = stream[start:stop]
        labels[: stop - start] = stream[start + 1 : stop + 1]
        weights[scored - start : stop - start] = 1
        scored = stop
        yield tokens, labels, weights
