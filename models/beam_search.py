"""Translates with an encoder-decoder: beam search, or greedy search.

The source is encoded once. The decoder does one target position at a time, from
the keys and values of those before (a cache).

A hypothesis Y is a sequence of tokens that ends with "end of sentence", or has
`max_length` tokens. Its score is

    log P(Y | source) / lp(Y),    lp(Y) = ((5 + |Y|) / 6) ** length_penalty

where |Y| counts all tokens, the end too. Of each sentence, the search keeps the
`beam_size` most probable beginnings of hypotheses. In each step it extends
them by every token; whatever ends among the `beam_size` most probable
extensions is a hypothesis and leaves the beam, and its place is taken by the
next one that goes on. A sentence is done when there are `beam_size`
hypotheses, or when no beginning can become better than the best of them: a
probability only falls, and lp is at most that of `max_length` tokens.

Cost: for each target position the decoder's work for `beam_size` positions a
sentence, and a copy of the cache.

Reference: [Wu et al., 2016](https://arxiv.org/abs/1609.08144), section 7;
without its coverage penalty
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import layers

from models import decoding
from models.translation_decoder import TranslationDecoder


class Translations(NamedTuple):
    """The best hypothesis of each sentence.

    Attributes:
        ids: Token ids (batch, `max_length`), int32: the tokens, with `eos_id`
            at the end unless there are `max_length` of them, then 0.
        scores: (batch,), float64: log-probability by length penalty.
    """

    ids: np.ndarray
    scores: np.ndarray


class BeamSearch:
    """Translates batches of sentences.

    Make it once and call it often: TensorFlow traces its step at the first
    call. Every call takes the weights that the layers have then.

    Args:
        layers: The layers of a model that `models.translation` made, with
            their weights: `model.layers` of a `tfgpipe.GPipe`.
        bos_id: Token id that every target begins with. It is not part of the
            results.
        eos_id: Token id that ends a hypothesis.
        max_length: Tokens of the longest hypothesis, the end included.
            Positive, and at most the model's `max_length`.
        beam_size: Beginnings to keep of each sentence. Positive; 1 is greedy
            search, which takes the most probable token each time.
        length_penalty: Exponent of the length penalty. 0 is none; larger ones
            favour longer hypotheses. Not negative.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        layers: Sequence[layers.Layer],
        *,
        bos_id: int,
        eos_id: int,
        max_length: int,
        beam_size: int = 4,
        length_penalty: float = 0.6,
    ) -> None:
        self._model = TranslationDecoder(layers, bos_id, beam_size)
        _check(
            self._model,
            bos_id=bos_id,
            eos_id=eos_id,
            max_length=max_length,
            beam_size=beam_size,
            length_penalty=length_penalty,
        )
        self._bos_id = bos_id
        self._eos_id = eos_id
        self._max_length = max_length
        self._beam_size = beam_size
        self._length_penalty = length_penalty

    def __call__(self, source_ids: Any) -> Translations:
        """Translates a batch.

        Args:
            source_ids: Token ids (batch, source length), integers; 0 is
                padding.

        Returns:
            The best hypothesis of each sentence.

        Raises:
            ValueError: If `source_ids` is not of that shape.
        """
        source = decoding.checked_ids(
            "source_ids", source_ids, "batch, source length"
        )
        model = self._model
        memory, visible = model.encode(source)
        beams = _Beams(len(source), self._beam_size, self._max_length)
        caches = model.empty_caches(len(source) * self._beam_size)
        newest = np.full(beams.scores.shape, self._bos_id, np.int32)
        parents = np.arange(newest.size, dtype=np.int32)
        for position in range(self._max_length):
            log_probs, ids, caches = model.step(
                newest.reshape(-1, 1),
                position,
                parents,
                caches,
                memory,
                visible,
            )
            newest, parents = beams.extend(
                log_probs.numpy(),
                ids.numpy(),
                self._eos_id,
                self._penalty(position + 1),
                self._penalty(self._max_length),
            )
            if beams.is_done.all():
                break
        return Translations(beams.best_ids, beams.best_scores)

    def _penalty(self, length: int) -> float:
        return ((5 + length) / 6) ** self._length_penalty


class _Beams:
    """The beginnings and the best hypothesis of each sentence.

    Args:
        batch: Sentences.
        beam_size: Beginnings of each.
        max_length: Tokens of the longest hypothesis.

    Attributes:
        scores: Log-probabilities of the beginnings (batch, `beam_size`), best
            first; -inf where there is none.
        best_ids: Tokens of the best hypothesis (batch, `max_length`).
        best_scores: Its score (batch,); -inf where there is none.
        is_done: Whether the search for a sentence has ended (batch,).
    """

    def __init__(self, batch: int, beam_size: int, max_length: int) -> None:
        self.scores = np.full((batch, beam_size), -np.inf)
        self.scores[:, 0] = 0.0  # all begin alike
        self.best_ids = np.zeros((batch, max_length), np.int32)
        self.best_scores = np.full(batch, -np.inf)
        self.is_done = np.zeros(batch, bool)
        self._ids = np.zeros((batch, beam_size, max_length), np.int32)
        self._num_hypotheses = np.zeros(batch, int)
        self._length = 0

    def extend(
        self,
        log_probs: np.ndarray,
        ids: np.ndarray,
        eos_id: int,
        penalty: float,
        largest_penalty: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds a token to every beginning.

        Args:
            log_probs: Log-probabilities of next tokens (rows, some), best
                first, twice as many as beams or all; rows are all beginnings
                of the first sentence, then those of the second, and so on.
            ids: The tokens (rows, some).
            eos_id: The token that ends a hypothesis.
            penalty: Length penalty of hypotheses that end here.
            largest_penalty: That of the longest ones.

        Returns:
            The token that each beginning now ends with (batch, beams), and the
            row of the beginning that it continues (rows,).
        """
        batch, beams = self.scores.shape
        scores = self.scores[..., None] + log_probs.reshape(batch, beams, -1)
        some = scores.shape[-1]
        scores = scores.reshape(batch, -1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : 2 * beams]
        scores = np.take_along_axis(scores, order, axis=1)
        tokens = np.take_along_axis(ids.reshape(batch, -1), order, axis=1)
        parents = order // some
        sequences = self._ids[np.arange(batch)[:, None], parents]
        sequences[..., self._length] = tokens
        self._length += 1
        ends = (tokens == eos_id) | (self._length == self.best_ids.shape[1])
        self._finish(
            np.where(ends, scores, -np.inf)[:, :beams] / penalty, sequences
        )
        # Those that go on come first, in order.
        on = np.argsort(ends, axis=1, kind="stable")[:, :beams]
        rows = np.arange(batch)[:, None]
        self.scores = np.where(ends, -np.inf, scores)[rows, on]
        self._ids = sequences[rows, on]
        bound = self.scores.max(axis=1) / largest_penalty
        self.is_done |= bound <= self.best_scores
        parents = parents[rows, on] + rows * beams
        return tokens[rows, on], parents.reshape(-1).astype(np.int32)

    def _finish(self, scores: np.ndarray, sequences: np.ndarray) -> None:
        """Takes note of hypotheses.

        Args:
            scores: Their scores (batch, beams); -inf where there is none.
            sequences: Their tokens (batch, beams or more, length).
        """
        best = scores.argmax(axis=1)
        rows = np.arange(len(best))
        better = (scores[rows, best] > self.best_scores) & ~self.is_done
        self.best_scores[better] = scores[rows, best][better]
        self.best_ids[better] = sequences[rows, best][better]
        self._num_hypotheses += np.isfinite(scores).sum(axis=1)
        self.is_done |= self._num_hypotheses >= scores.shape[1]


def _check(
    model: TranslationDecoder,
    *,
    bos_id: int,
    eos_id: int,
    max_length: int,
    beam_size: int,
    length_penalty: float,
) -> None:
    problems = [
        f"`{name}` must be a token id, from 1 to {model.vocab_size - 1}. "
        f"Received: {name}={value}."
        for name, value in (("bos_id", bos_id), ("eos_id", eos_id))
        if not 0 < value < model.vocab_size
    ]
    if not 0 < max_length <= model.max_length:
        problems.append(
            "`max_length` must be from 1 to that of the model, "
            f"{model.max_length}. Received: {max_length=}."
        )
    if beam_size < 1:
        problems.append(
            f"`beam_size` must be positive. Received: {beam_size=}."
        )
    if not length_penalty >= 0:
        problems.append(
            "`length_penalty` must not be negative. "
            f"Received: {length_penalty=}."
        )
    if problems:
        raise ValueError("\n".join(problems))
