r"""Perplexity of a 5-gram Kneser-Ney model: what a language model has to beat.

    python -m tools.kneser_ney
    python -m tools.kneser_ney --text=austen --order=3 --format=json

It learns from the same training paragraphs as the models of `params.lm`, and is
tested on the same ones. Its tokens are words and punctuation marks, each with
the space before it, if there is one: put together they are the paragraph, and
so the log-probability of a paragraph can be compared with that of any other
model, whatever its tokens. As there, it is divided by the number of words
between spaces and of ends of paragraphs (see `params.task.LanguageModel`).

No test word is left out, and none is replaced by "unknown". Where other models
spell out a word that they do not know, this one does so too: the base of its
n-grams is a distribution over all strings, a letter model (also Kneser-Ney)
that has learnt each training token once. A little of its probability goes to
strings that cannot be tokens.
"""

import math
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from params.text import READERS
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tools.flags import define
from tools.report import Report, Table, columns, define_format
from tools.text.ngrams import END, NGrams

FLAGS = command_line.new_flags()
define_format(FLAGS)
define(
    FLAGS,
    text=("austen", "What to learn from.", READERS),
    order=(5, "Tokens of the longest n-gram."),
    letter_order=(6, "Letters of the longest one."),
)

# A space, if there is one, and a word, or a mark, or the same mark repeated.
_TOKEN = re.compile(r" ?(?:[^\W_]+(?:['’][^\W_]+)*|([^\w\s]|_)\1*)")
_CODE_POINTS = 0x110000

COLUMNS = columns(
    "model | word_perplexity: perplexity a word: .1f | num_words: words: , | "
    "num_tokens: tokens: , | num_unknown: unknown: , | "
    "unknown_share: their nats: .1% | num_ngrams: n-grams: ,"
)


class Result(NamedTuple):
    """How well a model predicts the test paragraphs.

    Attributes:
        word_perplexity: The exponential of the nats a word.
        num_words: Words between spaces, and ends of paragraphs.
        num_tokens: Tokens of this model, ends of paragraphs included.
        num_unknown: Of these, how many do not occur in training.
        unknown_share: Share of all nats that these take.
        num_ngrams: N-grams of all lengths that the model has.
    """

    word_perplexity: float
    num_words: int
    num_tokens: int
    num_unknown: int
    unknown_share: float
    num_ngrams: int


def tokens(paragraph: str) -> list[str]:
    """Words and punctuation marks, with the spaces before them.

    Example:

    >>> tokens("It is -- I'm sure -- _true_.")
    [' It', ' is', ' --', " I'm", ' sure', ' --', ' _', 'true', '_', '.']
    """
    text = " " + " ".join(paragraph.split())
    return [match.group() for match in _TOKEN.finditer(text)]


def letter_model(words: Sequence[str], order: int) -> NGrams:
    """A distribution over all strings, learnt from some."""
    # Any code point, or the end.
    uniform = 1 / (_CODE_POINTS + 1)
    return NGrams(words, order, lambda letters: np.full(len(letters), uniform))


def word_model(
    paragraphs: Sequence[str], order: int = 5, letter_order: int = 6
) -> NGrams:
    """An n-gram model of `tokens`, on top of a letter model."""
    sequences = [tokens(paragraph) for paragraph in paragraphs]
    distinct = {token for sequence in sequences for token in sequence}
    letters = letter_model([END, *sorted(distinct)], letter_order)

    def spelled(words: Sequence[str]) -> np.ndarray:
        return np.exp([found.sum() for found in letters.log_probs(words)])

    return NGrams(sequences, order, spelled)


def evaluate(model: NGrams, paragraphs: Sequence[str]) -> Result:
    """Tests a `word_model`."""
    sequences = [tokens(paragraph) for paragraph in paragraphs]
    nats = -np.concatenate(model.log_probs(sequences))
    known = set(model.vocabulary)
    is_unknown = np.array(
        [t not in known for sequence in sequences for t in (*sequence, END)]
    )
    num_words = len(paragraphs) + sum(len(p.split()) for p in paragraphs)
    return Result(
        math.exp(nats.sum() / num_words),
        num_words,
        len(nats),
        int(is_unknown.sum()),
        float(nats[is_unknown].sum() / nats.sum()),
        sum(model.num_ngrams),
    )


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.kneser_ney", FLAGS, __doc__, _print, argv)


def _print(values: flags.FlagValues) -> None:
    documents = READERS[values.text]()
    with doing("counting the words"):
        model = word_model(documents.train, values.order, values.letter_order)
    with doing("testing"):
        result = evaluate(model, documents.test)
    report = Report("kneser_ney", values.format)
    report.add(
        Table(
            "kneser_ney",
            f"Test paragraphs of {values.text}",
            COLUMNS,
            [{"model": f"{values.order}-gram", **result._asdict()}],
            [
                "unknown: tokens that training does not have, and the share "
                "of the nats that spelling them takes"
            ],
        )
    )
    report.print()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
