"""Little texts for tests, instead of those that come with the source."""

import itertools

import numpy as np

from params import pair_texts, text
from params.text_files import Novels, Pair

SYLLABLES = "ka lo mi nu pe ra so ti vu za".split()
SIZES = {"aa": 90, "bb": 30, "cc": 12}  # pairs by language


def words(count, seed):
    """Words of one to three syllables; the same ones come again and again."""
    rng = np.random.default_rng(seed)
    vocabulary = ["".join(w) for w in itertools.product(SYLLABLES, repeat=2)]
    return [vocabulary[i] for i in rng.zipf(1.5, count) % len(vocabulary)]


def novels():
    train, test = (
        tuple(" ".join(words(12, seed)) for seed in seeds)
        for seeds in (range(60), range(60, 70))
    )
    return Novels(train, test)


def english():
    """Distinct strings of one to fifteen words."""
    return [
        " ".join([f"item{i}", *words(i % 15, seed=i)])
        for i in range(max(SIZES.values()))
    ]


def pairs(languages=None):
    """English, and the same backwards with the language before it."""
    return [
        Pair(language, string, f"{language} {string[::-1]}")
        for language, count in SIZES.items()
        for string in english()[:count]
        if languages is None or language in languages
    ]


def use(monkeypatch, cache_dir):
    """Has the data sets read these texts, and keep vocabularies there."""
    monkeypatch.setenv("TFGPIPE_CACHE", str(cache_dir))
    monkeypatch.setitem(text.READERS, "austen", novels)
    monkeypatch.setitem(pair_texts.READERS, "nmt102", pairs)
