"""Strings in two languages as token ids for a translation model.

What the model reads: the token of the language to translate into, that of the
language to translate from, the string, `EOS_ID`. What it writes: the string,
`EOS_ID`.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from params import names, text_files, tokenizer
from params.ragged import Ragged
from params.text_files import Pair
from params.tokenizer import BOS_ID, EOS_ID, Tokenizer

READERS = {"nmt102": text_files.read_pairs}
_LEARN_FROM = 3000  # strings of a language that the vocabulary is learnt from


class PairTexts:
    """Strings in English and other languages, and their token ids.

    Args:
        name: Where they are from: "nmt102".
        only: Languages besides English to keep; `None` for all.
        vocab_size: Most tokens of the vocabulary.
        max_length: Most tokens that `encode` returns of a string.
        to_english: Whether English is the target; else it is the source.
        source_token: Whether the model is told the source language.

    Attributes:
        bos_id: First id that the model is given of a target.
        eos_id: Id that ends a target.
        max_length: As given.
    """

    bos_id = BOS_ID
    eos_id = EOS_ID

    def __init__(
        self,
        name: str,
        only: Sequence[str] | None,
        vocab_size: int,
        max_length: int,
        to_english: bool = True,
        source_token: bool = True,
    ) -> None:
        self.name = name
        self.max_length = max_length
        self._only = only
        self._vocab_size = vocab_size
        self._to_english = to_english
        self._source_token = source_token

    @functools.cached_property
    def _pairs(self) -> dict[bool, list[Pair]]:
        """Pairs by whether they are held out."""
        pairs = READERS[self.name](languages=self._only)
        held_out = {p.english: text_files.is_held_out(p.english) for p in pairs}
        parts: dict[bool, list[Pair]] = {False: [], True: []}
        for pair in pairs:
            parts[held_out[pair.english]].append(pair)
        for language in sorted({pair.language for pair in pairs}):
            if not any(pair.language == language for pair in parts[False]):
                raise ValueError(
                    "`languages` must have training examples. Received: "
                    f"{language!r}, which has none. Leave it out."
                )
        return parts

    def examples(self, part: str) -> list[Pair]:
        """Strings as they are in the file.

        Args:
            part: "train" or "test".
        """
        if part not in ("train", "test"):
            raise ValueError(names.unknown("part", part, ("train", "test")))
        return self._pairs[part == "test"]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Training pairs by language, the largest first."""
        counts = Counter(pair.language for pair in self.examples("train"))
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item)))

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages besides English, by `sizes`."""
        return tuple(self.sizes)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the training part."""
        texts = defaultdict(list)
        for pair in self.examples("train"):
            texts[pair.language].append(pair.translation)
        learn_from = sorted({p.english for p in self.examples("train")})
        for language in self.languages:
            own = texts[language]
            learn_from += own[:: -(-len(own) // _LEARN_FROM)]
        others = [f"<2{name}>" for name in self._others()]
        return tokenizer.train_tokenizer(
            learn_from,
            self._vocab_size,
            symbols=[*others, *(f"<{name}>" for name in self._others(False))],
        )

    def _others(self, is_target: bool = True) -> list[str]:
        """The languages to translate into, or from."""
        is_english = self._to_english == is_target
        return ["en"] if is_english else sorted(self.languages)

    def encode(self, texts: Sequence[str], language: str) -> np.ndarray:
        """What the model reads, to translate.

        Args:
            texts: Strings in the source language.
            language: The language besides English.
        """
        ids = self._source_ids(texts, [language] * len(texts))
        return ids.padded(np.arange(len(texts)), self.max_length)

    def decode(self, ids: np.ndarray) -> list[str]:
        """Texts of target ids (batch, length), each up to `eos_id`."""
        return self.tokenizer.decode(np.asarray(ids).tolist())

    def _source_ids(
        self, texts: Sequence[str], languages: Sequence[str]
    ) -> Ragged:
        prefixes = {name: self._prefix(name) for name in set(languages)}
        return Ragged.of(
            [
                [*prefixes[language], *ids, EOS_ID]
                for language, ids in zip(
                    languages, self.tokenizer.encode(texts), strict=True
                )
            ]
        )

    def _prefix(self, language: str) -> list[int]:
        """Tokens that say into and from which language to translate."""
        if language not in self.sizes:
            raise ValueError(names.unknown("language", language, self.sizes))
        ends = ("en", language) if self._to_english else (language, "en")
        symbols = [f"<2{ends[0]}>"]
        if self._source_token:
            symbols.append(f"<{ends[1]}>")
        return [self.tokenizer.symbol_id(symbol) for symbol in symbols]

    def encoded(self, part: str) -> tuple[Ragged, Ragged]:
        """Source and target ids of all examples of a part."""
        pairs = self.examples(part)
        english = [pair.english for pair in pairs]
        others = [pair.translation for pair in pairs]
        texts = (others, english) if self._to_english else (english, others)
        targets = [[*ids, EOS_ID] for ids in self.tokenizer.encode(texts[1])]
        sources = self._source_ids(texts[0], [pair.language for pair in pairs])
        return sources, Ragged.of(targets)
