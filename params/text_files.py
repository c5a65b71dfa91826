"""Reads the texts that come with the source, and splits off the test part.

Their formats, sources and licences are in data/NOTICE.md.
"""

import hashlib
import lzma
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from params import names

SHIPPED = pathlib.Path(__file__).resolve().parent.parent / "data"

_CURE = "Restore it: git checkout -- data"
_CHAPTER = re.compile(r"^ *chapter [0-9ivxl]+\.?$", re.IGNORECASE)
_HELD_OUT_EVERY = 20


class Novels(NamedTuple):
    """Running text, as paragraphs on one line each.

    Attributes:
        train: For training, in the order of the text.
        test: Those of the chapters that are held out.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]


class Pair(NamedTuple):
    """A string in two languages.

    Attributes:
        language: Code of the language that is not English: "de".
        english: The English string.
        translation: The same in the other language.
    """

    language: str
    english: str
    translation: str


def read_novels(path: pathlib.Path = SHIPPED / "austen.txt.xz") -> Novels:
    """Reads Jane Austen's novels.

    A line that says "CHAPTER" and a number begins a chapter; what stands before
    the first one belongs to it. Chapters, counted from 0, are held out if they
    leave 10 when divided by 20.

    Args:
        path: The xz-compressed text, in UTF-8. Empty lines part paragraphs.

    Raises:
        ValueError: If the file is damaged, or has not enough chapters.
        FileNotFoundError: If it is missing.
    """
    chapters: list[list[str]] = [[]]
    seen_one = False
    for line in _lines(path):
        if _CHAPTER.match(line):
            if seen_one:
                chapters.append([])
            seen_one = True
        chapters[-1].append(line.strip())
    if len(chapters) <= _HELD_OUT_EVERY // 2:
        raise ValueError(
            "`path` must be a text in chapters, enough of them to hold one "
            f"out: {_HELD_OUT_EVERY // 2 + 1}. Received: path={str(path)!r} "
            f"with {len(chapters)}. {_CURE}"
        )
    parts: dict[bool, list[str]] = {False: [], True: []}
    for number, chapter in enumerate(chapters):
        held_out = number % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2
        parts[held_out] += _paragraphs(chapter)
    return Novels(tuple(parts[False]), tuple(parts[True]))


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Joins the lines between empty ones."""
    text = "\n".join(lines)
    blocks = re.split(r"\n{2,}", text.strip("\n"))
    return [block.replace("\n", " ") for block in blocks if block]


def read_pairs(
    path: pathlib.Path = SHIPPED / "nmt102_p4.tsv.xz",
    languages: Sequence[str] | None = None,
) -> list[Pair]:
    """Reads strings in English and in other languages.

    Args:
        path: The xz-compressed file, in UTF-8: English strings, one a line; an
            empty line; then lines of language, TAB, index of the English
            string from 0, TAB, translation.
        languages: Languages to keep; `None` for all.

    Raises:
        ValueError: If the file is damaged or has another format, or a language
            has no pair.
        FileNotFoundError: If it is missing.
    """
    lines = _lines(path)
    if "" not in lines:
        raise _bad_pairs(path, "no empty line after the English strings")
    blank = lines.index("")
    english = lines[:blank]
    kept = None if languages is None else set(languages)
    pairs, found = [], set()
    for number, line in enumerate(lines[blank + 1 :], start=blank + 2):
        fields = line.split("\t")
        if len(fields) != 3 or not all(fields):
            raise _bad_pairs(path, f"line {number} is {line!r}")
        language, index, translation = fields
        if not index.isdecimal() or int(index) >= len(english):
            raise _bad_pairs(
                path,
                f"line {number} has the index {index!r}, with {len(english)} "
                "English strings",
            )
        found.add(language)
        if kept is None or language in kept:
            pairs.append(Pair(language, english[int(index)], translation))
    if not found:
        raise _bad_pairs(path, "no pairs")
    for language in kept or ():
        if language not in found:
            raise ValueError(names.unknown("languages", language, found))
    return pairs


def is_held_out(english: str) -> bool:
    """Whether a string and all its translations are for testing only.

    The data are multi-way parallel: a string that was seen with one language
    must not be tested with another. About one of 20 is held out.

    Example:

    >>> [is_held_out(text) for text in ("Today", "today", "Tomorrow")]
    [True, True, False]
    """
    digest = hashlib.md5(english.lower().encode("utf-8"), usedforsecurity=False)
    return int(digest.hexdigest(), 16) % 20 == 0


def _bad_pairs(path: pathlib.Path, problem: str) -> ValueError:
    return ValueError(
        "`path` must hold English strings, an empty line, and lines of "
        "language, index and translation with tabs between them. Received: "
        f"path={str(path)!r}, where {problem}. {_CURE}"
    )


def _lines(path: pathlib.Path) -> list[str]:
    """The lines of a compressed text; an error names the file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"`path` must be a file. Received: path={str(path)!r}, which does "
            f"not exist. {_CURE}"
        )
    try:
        text = lzma.decompress(path.read_bytes()).decode("utf-8")
    except (lzma.LZMAError, EOFError, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            "`path` must be a whole xz file with text in UTF-8. Received: "
            f"path={str(path)!r}, of which reading failed with: {error}. "
            f"{_CURE}"
        ) from error
    return text.removesuffix("\n").split("\n")
