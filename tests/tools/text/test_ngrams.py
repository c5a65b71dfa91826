"""Kneser-Ney n-grams: numbers by hand, and by the formulas, slowly."""

import collections
import itertools

import numpy as np
import pytest

from tools.text.ngrams import END, NGrams, discounts

TOKENS = ["a", "b", "c", "d"]


def uniform(num_tokens=5):
    """A base over so many tokens, END among them."""
    return lambda tokens: np.full(len(tokens), 1 / num_tokens)


def probability(model, context, token):
    """p(token | the beginning of a sequence and a context)."""
    sequence = [*context, token] if token != END else context
    (found,) = model.log_probs([sequence])
    return np.exp(found[len(context)])


def sequences(seed, count=12):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, count)
    return [rng.choice(TOKENS[:3], length).tolist() for length in lengths]


# ------------------------------------------------------------ the same, slowly
class Slow:
    """The formulas of the module, n-gram by n-gram."""

    def __init__(self, sequences, order, base):
        self.base = base
        self.order = order
        grams = collections.Counter()
        for sequence in sequences:
            padded = [*["<s>"] * (order - 1), *sequence, END]
            for end in range(order, len(padded) + 1):
                grams[tuple(padded[end - order : end])] += 1
        self.counts = {order: grams}
        for n in reversed(range(1, order)):
            shorter = collections.Counter(g[1:] for g in self.counts[n + 1])
            self.counts[n] = shorter
        self.discounts = {
            n: discounts(np.array(list(c.values())))
            for n, c in self.counts.items()
        }

    def probability(self, context, token):
        n = len(context) + 1
        lower = (
            self.probability(context[1:], token)
            if n > 1
            else self.base([token])[0]
        )
        own = [c for g, c in self.counts[n].items() if g[:-1] == context]
        if not own:
            return lower
        d = self.discounts[n]
        count = self.counts[n][(*context, token)]
        share = sum(d[min(c, 3)] for c in own) / sum(own)
        return (count - d[min(count, 3)]) / sum(own) + share * lower

    def log_probs(self, sequence):
        padded = [*["<s>"] * (self.order - 1), *sequence, END]
        return [
            np.log(
                self.probability(
                    tuple(padded[end - self.order : end - 1]), padded[end - 1]
                )
            )
            for end in range(self.order, len(padded) + 1)
        ]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [3, 60])
def test_probabilities_are_those_of_the_formulas(order, count):
    train = sequences(seed=1, count=count)
    tests = [*sequences(seed=2), ["d", "a", "d"], []]
    model = NGrams(train, order, uniform())
    slow = Slow(train, order, uniform())
    for found, sequence in zip(model.log_probs(tests), tests, strict=True):
        np.testing.assert_allclose(found, slow.log_probs(sequence))


# -------------------------------------------------------------------- by hand
def test_bigrams_of_two_sequences_are_those_by_hand():
    # Bigrams: <s>a 2, ab 1, ac 1, b. 1, c. 1. Tokens in different contexts:
    # a 1, b 1, c 1, end 2. No n-gram occurs 3 times: discounts 0.5, 1, 1.5.
    model = NGrams([["a", "b"], ["a", "c"]], 2, uniform(4))
    end = (2 - 1) / 5 + (3 * 0.5 + 1) / 5 / 4
    other = (1 - 0.5) / 5 + (3 * 0.5 + 1) / 5 / 4
    assert end + 3 * other == pytest.approx(1)
    assert probability(model, [], "a") == pytest.approx(
        (2 - 1) / 2 + 1 / 2 * other
    )
    assert probability(model, ["a"], "b") == pytest.approx(
        (1 - 0.5) / 2 + 2 * 0.5 / 2 * other
    )
    assert probability(model, ["a"], END) == pytest.approx(2 * 0.5 / 2 * end)
    assert probability(model, ["new"], "a") == pytest.approx(other)
    assert model.num_ngrams == [4, 5]


def test_discounts_are_those_by_hand():
    counts = np.array([1] * 4 + [2] * 2 + [3] * 2 + [4] + [9] * 5 + [0] * 7)
    # Y = 4 / (4 + 2 * 2) = 1 / 2
    expected = [0, 1 - 2 * 0.5 * 2 / 4, 2 - 3 * 0.5 * 2 / 2, 3 - 4 * 0.5 / 2]
    np.testing.assert_allclose(discounts(counts), expected)


# ------------------------------------------------------------------ promises
@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize(
    "context", [[], ["a"], ["b", "c", "a"], ["d"], ["a", "d", "d", "d"]]
)
def test_probabilities_of_all_tokens_add_up_to_one(order, context):
    model = NGrams(sequences(seed=3, count=40), order, uniform())
    total = sum(probability(model, context, t) for t in [*TOKENS, END])
    assert total == pytest.approx(1)


def test_counts_of_long_texts_are_not_mixed_up():
    # Every sequence of three tokens as often as its place says.
    kinds = list(itertools.product(TOKENS, repeat=3))
    train = [list(k) for i, k in enumerate(kinds) for _ in range(i + 1)]
    model = NGrams(train, 3, uniform())
    slow = Slow(train, 3, uniform())
    for kind in kinds[::7]:
        np.testing.assert_allclose(
            model.log_probs([list(kind)])[0], slow.log_probs(kind)
        )
