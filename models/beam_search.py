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

Sentences go through the devices of the layers in as many groups, each with a
loop of its own over target positions. What is found does not depend on that,
but for rounding.

Reference: [Wu et al., 2016](https://arxiv.org/abs/1609.08144), section 7;
without its coverage penalty
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras import layers, tree

from models import decoding
from models.translation_decoder import TranslationDecoder

_NONE = np.float64(-np.inf)  # the score of what there is not


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

    Make it once and call it often: TensorFlow traces the search at the first
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
        self._bos_id = int(bos_id)
        self._eos_id = int(eos_id)
        self._beam_size = beam_size
        self._penalties = np.array(
            [((6 + n) / 6) ** length_penalty for n in range(max_length)]
        )
        self._num_groups = decoding.num_devices(layers)
        self._run = tf.function(
            self._search,
            input_signature=[tf.TensorSpec((None, None), tf.int32)],
            autograph=False,
        )

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
        return Translations(*(x.numpy() for x in self._run(source)))

    def _search(self, source: Any) -> tuple[Any, Any]:
        """Ids and scores of all sentences."""
        function = functools.partial(self._search_group, source)
        rows = tf.shape(source)[0]
        return decoding.in_groups(function, rows, self._num_groups)

    def _search_group(self, source: Any, *rows: Any) -> Any:
        model = self._model
        source = source[slice(*rows)]
        memory, visible = model.encode(source)
        beams = _Beams.start(
            tf.shape(source)[0],
            self._beam_size,
            len(self._penalties),
            self._bos_id,
        )
        before = model.empty_caches(tf.size(beams.newest))

        def extend(beams: _Beams, before: Any) -> tuple[_Beams, Any]:
            before = tree.map_structure(
                lambda x: tf.gather(x, beams.parents), before
            )
            log_probs, ids, caches = model.step(
                tf.reshape(beams.newest, (-1, 1)),
                beams.length,
                before,
                memory,
                visible,
            )
            return (
                beams.extended(log_probs, ids, self._eos_id, self._penalties),
                caches,
            )

        beams, _ = tf.while_loop(
            lambda beams, _: ~tf.reduce_all(beams.is_done),
            extend,
            (beams, before),
            (_Beams(*(x.shape for x in beams)), decoding.growing(before)),
            maximum_iterations=len(self._penalties),
            parallel_iterations=1,
        )
        return beams.best_ids, beams.best_scores


class _Beams(NamedTuple):
    """The beginnings and the best hypothesis of each sentence."""

    # Log-probabilities of beginnings (batch, beams), best first, or none.
    scores: Any
    ids: Any  # their tokens (batch, beams, `max_length`)
    newest: Any  # the last of these (batch, beams)
    parents: Any  # rows that the beginnings continue (rows,)
    length: Any  # tokens of each
    best_ids: Any  # tokens of the best hypothesis (batch, `max_length`)
    best_scores: Any  # its score (batch,), or none
    num_hypotheses: Any  # how many were found (batch,)
    is_done: Any  # whether the search for a sentence has ended (batch,)

    @classmethod
    def start(
        cls, batch: Any, beams: int, max_length: int, bos_id: int
    ) -> "_Beams":
        """Empty beginnings of sentences: one each, as all begin alike."""
        none = tf.fill((batch, beams - 1), _NONE)
        return cls(
            scores=tf.concat([tf.zeros((batch, 1), none.dtype), none], 1),
            ids=tf.zeros((batch, beams, max_length), tf.int32),
            newest=tf.fill((batch, beams), bos_id),
            parents=tf.range(batch * beams),
            length=tf.constant(0),
            best_ids=tf.zeros((batch, max_length), tf.int32),
            best_scores=tf.fill((batch,), _NONE),
            num_hypotheses=tf.zeros((batch,), tf.int32),
            is_done=tf.zeros((batch,), tf.bool),
        )

    def extended(
        self, log_probs: Any, ids: Any, eos_id: int, penalties: np.ndarray
    ) -> "_Beams":
        """Adds a token to every beginning.

        Args:
            log_probs: Log-probabilities of next tokens (rows, some), best
                first, twice as many as beams or all; rows are all beginnings
                of the first sentence, then those of the second, and so on.
            ids: The tokens (rows, some).
            eos_id: The token that ends a hypothesis.
            penalties: Length penalties of 1, 2, ... `max_length` tokens.
        """
        batch, beams = tf.shape(self.scores)[0], self.scores.shape[1]
        some = ids.shape[1]
        log_probs = tf.reshape(log_probs, (batch, beams, some))
        scores = self.scores[..., None] + tf.cast(log_probs, tf.float64)
        scores, order = tf.math.top_k(  # of equal ones, the first come first
            tf.reshape(scores, (batch, beams * some)),
            min(2 * beams, beams * some),
        )
        tokens = _taken(tf.reshape(ids, (batch, beams * some)), order)
        parents = order // some
        is_new = tf.range(len(penalties)) == self.length
        sequences = tf.where(
            is_new, tokens[..., None], _taken(self.ids, parents)
        )
        length = self.length + 1
        ends = (tokens == eos_id) | (length == len(penalties))
        ended = tf.where(ends, scores, _NONE)[:, :beams]
        ended /= tf.constant(penalties)[self.length]
        found = self._finished(ended, sequences)
        # Those that go on come first, in order.
        on = tf.math.top_k(tf.cast(~ends, tf.int32), beams).indices
        scores = _taken(tf.where(ends, _NONE, scores), on)
        bound = tf.reduce_max(scores, 1) / penalties[-1]
        rows = beams * tf.range(batch)[:, None] + _taken(parents, on)
        return found._replace(
            scores=scores,
            ids=_taken(sequences, on),
            newest=_taken(tokens, on),
            parents=tf.reshape(rows, (-1,)),
            length=length,
            is_done=found.is_done | (bound <= found.best_scores),
        )

    def _finished(self, scores: Any, sequences: Any) -> "_Beams":
        """Takes note of hypotheses.

        Args:
            scores: Their scores (batch, beams); -inf where there is none.
            sequences: Their tokens (batch, beams or more, length).
        """
        best = tf.argmax(scores, 1, tf.int32)[:, None]
        score, tokens = (_taken(x, best)[:, 0] for x in (scores, sequences))
        better = (score > self.best_scores) & ~self.is_done
        found = tf.cast(tf.math.is_finite(scores), tf.int32)
        count = self.num_hypotheses + tf.reduce_sum(found, 1)
        return self._replace(
            best_ids=tf.where(better[:, None], tokens, self.best_ids),
            best_scores=tf.where(better, score, self.best_scores),
            num_hypotheses=count,
            is_done=self.is_done | (count >= scores.shape[1]),
        )


def _taken(x: Any, indices: Any) -> Any:
    """Of each row (batch, n, ...), some: (batch, m, ...)."""
    return tf.gather(x, indices, batch_dims=1)


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
