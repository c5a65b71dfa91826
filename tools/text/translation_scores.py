"""BLEU and chrF of translated test pairs, by groups of languages.

A language has a twentieth of its pairs for testing: too few, in most, for a
score of its own. So the languages are grouped by how many training pairs they
have, and a group's pairs are scored together, like one long text.

References: [Papineni et al., 2002](https://aclanthology.org/P02-1040),
[Popović, 2015](https://aclanthology.org/W15-3049),
[Post, 2018](https://arxiv.org/abs/1804.08771)
"""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from params.pairs import PairSource
from params.text_files import Pair
from tools.report import progress
from tools.text.translator import Translator

# Scarce, less scarce, less rich, rich: fewer training pairs than these.
_BOUNDS = (1000, 3000, 10000)
_WITHOUT_SPACES = ("ja", "km", "lo", "my", "th", "zh")
_BATCH_SIZE = 64


class Translated(NamedTuple):
    """A test pair and what a model made of it.

    Attributes:
        language: The language besides English.
        reference: The text in the target language.
        hypothesis: The translation.
    """

    language: str
    reference: str
    hypothesis: str


class Group(NamedTuple):
    """Languages with about as many training pairs.

    Attributes:
        name: How many.
        languages: Their codes.
    """

    name: str
    languages: tuple[str, ...]


def translate_test(
    source: PairSource,
    translator: Translator,
    to_english: bool,
    max_pairs: int | None = None,
) -> list[Translated]:
    """Translates the test pairs, with a progress bar."""
    by_language = defaultdict(list)
    for pair in source.examples("test"):
        by_language[pair.language].append(pair)
    batches = []
    for language in source.languages:
        pairs = _spread(by_language[language], max_pairs)
        # Rows of about one length: less padding.
        pairs.sort(key=lambda pair: len(_ends(pair, to_english)[0]))
        starts = range(0, len(pairs), _BATCH_SIZE)
        batches += [(language, pairs[i : i + _BATCH_SIZE]) for i in starts]
    found = []
    for language, pairs in progress(batches, "translating"):
        ends = [_ends(pair, to_english) for pair in pairs]
        ids = translator.encode([text for text, _ in ends], language)
        found += [
            Translated(language, reference, hypothesis)
            for (_, reference), hypothesis in zip(
                ends, translator.translate(ids), strict=True
            )
        ]
    return found


def _ends(pair: Pair, to_english: bool) -> tuple[str, str]:
    """What is translated, and into what."""
    ends = (pair.translation, pair.english)
    return ends if to_english else ends[::-1]


def _spread(pairs: Sequence[Pair], most: int | None) -> list[Pair]:
    if most is None or len(pairs) <= most:
        return list(pairs)
    places = np.linspace(0, len(pairs) - 1, most).round().astype(int)
    return [pairs[place] for place in places]


def groups(sizes: Mapping[str, int]) -> list[Group]:
    """Languages by their number of training pairs, from scarce to rich.

    Example:

    >>> groups({"es": 22120, "so": 900, "ny": 19})
    [Group(name='under 1,000', languages=('so', 'ny')), \
Group(name='10,000 and more', languages=('es',))]
    """
    names = [
        f"under {_BOUNDS[0]:,}",
        *(f"{a:,} to {b:,}" for a, b in itertools.pairwise(_BOUNDS)),
        f"{_BOUNDS[-1]:,} and more",
    ]
    members: dict[str, list[str]] = {name: [] for name in names}
    for language, size in sizes.items():
        place = int(np.searchsorted(_BOUNDS, size, side="right"))
        members[names[place]].append(language)
    return [Group(n, tuple(found)) for n, found in members.items() if found]


def group_rows(
    translated: Sequence[Translated],
    sizes: Mapping[str, int],
    to_english: bool,
) -> list[dict[str, Any]]:
    """Scores by group, then of all languages together."""
    every = [*groups(sizes), Group("all", tuple(sizes))]
    if len(every) == 2:  # one group, which is all
        del every[0]
    rows = []
    for group in every:
        own = [t for t in translated if t.language in group.languages]
        if own:
            rows.append(
                {
                    "group": group.name,
                    "num_languages": len(group.languages),
                    "train_pairs": sum(sizes[name] for name in group.languages),
                    **score(own, to_english),
                }
            )
    return rows


def language_rows(
    translated: Sequence[Translated],
    sizes: Mapping[str, int],
    to_english: bool,
    only: Iterable[str],
) -> list[dict[str, Any]]:
    """Scores by language."""
    by_language = defaultdict(list)
    for one in translated:
        by_language[one.language].append(one)
    return [
        {
            "language": name,
            "train_pairs": sizes[name],
            **score(by_language[name], to_english),
        }
        for name in only
        if by_language[name]
    ]


def score(
    translated: Sequence[Translated], to_english: bool
) -> dict[str, float]:
    """BLEU and chrF of some pairs, as of one text."""
    metrics = sacrebleu().metrics
    cutters = {
        is_char: metrics.BLEU(tokenize="char" if is_char else "13a").tokenizer
        for is_char in (False, True)
    }

    def cut(text: str, language: str) -> str:
        code = "en" if to_english else language
        is_char = code.replace("-", "_").split("_")[0] in _WITHOUT_SPACES
        return cutters[is_char](text)

    # Already cut, so that languages with other rules can stand in one text.
    bleu = metrics.BLEU(tokenize="none", force=True).corpus_score(
        [cut(one.hypothesis, one.language) for one in translated],
        [[cut(one.reference, one.language) for one in translated]],
    )
    chrf = metrics.CHRF().corpus_score(
        [one.hypothesis for one in translated],
        [[one.reference for one in translated]],
    )
    return {
        "test_pairs": len(translated),
        "bleu": bleu.score,
        "chrf": chrf.score,
    }


def sacrebleu() -> Any:
    """The package, or an error that says how to get it."""
    with warnings.catch_warnings():
        # What it imports is older than this Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import sacrebleu
        except ImportError as error:
            raise ImportError(
                "The package sacrebleu is needed to score translations, and "
                "is not installed. Install it: pip install '.[text]'"
            ) from error
    return sacrebleu
