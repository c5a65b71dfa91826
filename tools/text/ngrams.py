"""Interpolated n-gram models with modified Kneser-Ney smoothing.

With c(h w) the count of the n-gram of a context h and a token w, c(h) the sum
of these over all w, N_i(h) the number of w with the count i (N_3: with 3 or
more), and h' the context h without its first token,

    p(w | h) = max(c(h w) - D(c(h w)), 0) / c(h) + g(h) p(w | h')
    g(h) = (D(1) N_1(h) + D(2) N_2(h) + D(3) N_3(h)) / c(h)

where p(w | h) = p(w | h') for a context that was not seen. The longest n-grams
are counted as they occur. A shorter one counts once for each different token
that stands before it: what follows many contexts is likely in a new one. Each
length has discounts of its own, see `discounts`. A single token has an empty
context, and below it is a base distribution over all tokens that there can be,
so that nothing has the probability 0.

A sequence is predicted with its end, from a context that tells its beginning.

Time and memory: proportional to the tokens times the longest n-gram's length.

Reference: [Chen and Goodman, 1999](https://doi.org/10.1006/csla.1999.0128),
section 3
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

END = ""  # the token that ends a sequence
_PAD, _END = 0, 1  # ids; pads stand before a sequence
_USUAL_DISCOUNTS = (0.0, 0.5, 1.0, 1.5)

Base = Callable[[Sequence[str]], np.ndarray]


class NGrams:
    """An n-gram model of sequences of tokens.

    Args:
        sequences: What to learn from: tokens, which are no empty strings.
        order: n, the tokens of the longest n-gram. Positive.
        base: Probabilities, each more than 0, of a list of different tokens,
            of which one may be `END`.

    Raises:
        ValueError: If there is nothing to learn from, or `order` is not
            positive.
    """

    def __init__(
        self, sequences: Iterable[Sequence[str]], order: int, base: Base
    ) -> None:
        sequences = list(sequences)
        if order < 1 or not sequences:
            raise ValueError(
                "`order` must be positive, and `sequences` not empty. "
                f"Received: order={order} and {len(sequences)} sequences."
            )
        self._order = order
        self._base = base
        tokens = dict.fromkeys(itertools.chain.from_iterable(sequences))
        self._ids = {END: _END}
        self._ids |= {token: _END + 1 + i for i, token in enumerate(tokens)}
        self._unknown = len(self._ids) + 1  # ids of pads and END included
        self._levels = _levels(
            self._stream(sequences), order, self._unknown + 1
        )

    @property
    def vocabulary(self) -> list[str]:
        """The tokens that were learnt from, `END` first."""
        return list(self._ids)

    @property
    def num_ngrams(self) -> list[int]:
        """How many different n-grams there are, by length from 1."""
        return [int((level.counts > 0).sum()) for level in self._levels]

    def log_probs(self, sequences: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Log-probabilities of every token of some sequences."""
        if not sequences:
            return []
        words = self._stream(sequences)
        is_predicted = words != _PAD
        probabilities = np.ones(len(words))
        probabilities[is_predicted] = self._base_of(sequences)
        ids = np.zeros_like(words)  # of the n-gram that ends there, or -1
        for n, level in enumerate(self._levels):
            contexts = _shifted(ids) if n else ids
            ids = level.find(contexts, words)
            probabilities = level.interpolated(contexts, ids, probabilities)
        predicted = np.log(probabilities[is_predicted])
        ends = np.cumsum([len(sequence) + 1 for sequence in sequences])
        return np.split(predicted, ends[:-1])

    def _stream(self, sequences: Iterable[Sequence[str]]) -> np.ndarray:
        """Ids of all sequences, each after `order - 1` pads: (positions,)."""
        pads = [_PAD] * (self._order - 1)
        get, unknown = self._ids.get, self._unknown
        stream: list[int] = []
        for sequence in sequences:
            stream += pads
            stream += [get(token, unknown) for token in sequence]
            stream.append(_END)
        return np.array(stream, np.int64)

    def _base_of(self, sequences: Iterable[Sequence[str]]) -> np.ndarray:
        """Base probabilities of all tokens and ends, without pads."""
        flat = [t for sequence in sequences for t in (*sequence, END)]
        distinct = list(dict.fromkeys(flat))
        values = dict(zip(distinct, self._base(distinct), strict=True))
        return np.array([values[token] for token in flat])


class _Level:
    """The n-grams of one length.

    Args:
        keys: Of each n-gram its context, as an id of the next shorter length,
            times `num_words`, plus its last word. Ascending. An n-gram's id is
            its place here.
        counts: Of each n-gram.
        num_contexts: N-grams of the next shorter length; 1 if there is none.
        num_words: More than the id of any word.
    """

    def __init__(
        self,
        keys: np.ndarray,
        counts: np.ndarray,
        num_contexts: int,
        num_words: int,
    ) -> None:
        self.counts = counts
        self._keys = keys
        self._num_words = num_words
        self._discounts = discounts(counts)
        contexts = keys // num_words
        self._totals = np.bincount(contexts, counts, num_contexts)
        taken = np.bincount(contexts, self._discount(counts), num_contexts)
        self._shares = taken / np.maximum(self._totals, 1)  # g(h)

    def _discount(self, counts: np.ndarray) -> np.ndarray:
        return self._discounts[np.minimum(counts, 3)]

    def find(self, contexts: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Ids of n-grams, or -1, for contexts (-1: not seen) and words."""
        keys = contexts * self._num_words + words
        places = np.searchsorted(self._keys, keys)
        places = np.minimum(places, len(self._keys) - 1)
        is_known = (contexts >= 0) & (self._keys[places] == keys)
        return np.where(is_known, places, -1)

    def interpolated(
        self, contexts: np.ndarray, ids: np.ndarray, lower: np.ndarray
    ) -> np.ndarray:
        """Probabilities p(w | h), from p(w | h')."""
        totals = self._totals[contexts]
        counts = np.where(ids >= 0, self.counts[ids], 0)
        own = (counts - self._discount(counts)) / np.maximum(totals, 1)
        is_known = (contexts >= 0) & (totals > 0)
        return np.where(is_known, own + self._shares[contexts] * lower, lower)


def discounts(counts: np.ndarray) -> np.ndarray:
    """What is taken off a count of 0, 1, 2, and 3 or more.

    With n_i the number of n-grams with the count i and Y = n_1 / (n_1 + 2 n_2),

        D(i) = i - (i + 1) Y n_(i + 1) / n_i

    Where a text is so small that one of n_1 to n_4 is 0, or a discount is not
    between 0 and its count, the discounts are 0.5, 1 and 1.5.
    """
    n = [np.count_nonzero(counts == i) for i in range(5)]
    if not all(n[1:]):
        return np.array(_USUAL_DISCOUNTS)
    y = n[1] / (n[1] + 2 * n[2])
    found = [i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3)]
    if not all(0 < d <= i for i, d in enumerate(found, start=1)):
        return np.array(_USUAL_DISCOUNTS)
    return np.array([0.0, *found])


def _levels(words: np.ndarray, order: int, num_words: int) -> list[_Level]:
    """Counts the n-grams of every length up to `order` in a stream of ids."""
    ids, keys = [], []
    for n in range(order):
        contexts = _shifted(ids[-1]) if n else np.zeros_like(words)
        inside = contexts >= 0  # not so near the beginning
        all_keys = contexts[inside] * num_words + words[inside]
        distinct, places = np.unique(all_keys, return_inverse=True)
        ids.append(np.full(len(words), -1))
        ids[-1][inside] = places
        keys.append(distinct)
    levels = []
    for n in range(order):
        is_counted = words != _PAD
        if n + 1 < order:
            # One occurrence of each n-gram that is longer by a token.
            longer = np.where(is_counted, ids[n + 1], -1)
            distinct, first = np.unique(longer, return_index=True)
            counted = ids[n][first[distinct >= 0]]
        else:
            counted = ids[n][is_counted]
        counts = np.bincount(counted, minlength=len(keys[n]))
        num_contexts = len(keys[n - 1]) if n else 1
        levels.append(_Level(keys[n], counts, num_contexts, num_words))
    return levels


def _shifted(ids: np.ndarray) -> np.ndarray:
    """The ids of the position before; -1 at the first."""
    return np.concatenate([[-1], ids[:-1]])
