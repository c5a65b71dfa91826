"""The n-gram baseline: what it counts, and what it knows of new words."""

import json
import math

import numpy as np
import pytest
import texts

from tools import kneser_ney
from tools.kneser_ney import evaluate, letter_model, tokens, word_model
from tools.text.ngrams import END

TRAIN = ["It is a truth.", "It is a fact, a truth -- a _fact_."] * 3


@pytest.mark.parametrize(
    "paragraph",
    [
        "It is a truth universally acknowledged, that a man's wife--Oh!",
        "  two   spaces\tand a\nline ",
        "'quoted' \"words,\" _italics_ ... don't, O'Brien's 3rd ½ é",
        "x_y__z?!?!!",
    ],
)
def test_tokens_put_together_are_the_paragraph(paragraph):
    assert "".join(tokens(paragraph)) == " " + " ".join(paragraph.split())


def test_letters_are_a_distribution():
    letters = letter_model(["ab", "abc", "b", END], 3)
    for begin in ("", "a", "ab", "z"):
        (known,) = letters.log_probs([begin])
        seen = np.exp(known[-1])  # END
        for letter in "abc":
            (found,) = letters.log_probs([begin + letter])
            seen += np.exp(found[len(begin)])
        (found,) = letters.log_probs([begin + "x"])
        # Each of the code points that were not seen has the same.
        others = np.exp(found[len(begin)]) * (0x110000 - 3)
        assert seen + others == pytest.approx(1)


def test_known_tokens_and_new_ones_share_the_probability():
    model = word_model(TRAIN, 3, 3)
    known = set(model.vocabulary)

    def probability(token):
        sequence = [" It", " is", token] if token != END else [" It", " is"]
        return np.exp(model.log_probs([sequence])[0][2])

    total = sum(probability(token) for token in known)
    new = sum(probability(token) for token in (" fate", " tact", " xyz"))
    assert 0.8 < total < total + new < 1
    assert probability(" tact") > probability(" xyz") > 0


def test_perplexity_is_of_words_between_spaces_and_ends():
    model = word_model(TRAIN, 2, 2)
    paragraphs = ["It is a new truth.", "It is."]
    result = evaluate(model, paragraphs)
    nats = -sum(
        model.log_probs([tokens(paragraph)])[0].sum()
        for paragraph in paragraphs
    )
    assert result.num_words == 5 + 2 + 2
    assert result.num_tokens == 6 + 3 + 2
    assert result.num_unknown == 1
    assert result.word_perplexity == pytest.approx(math.exp(nats / 9))
    assert 0 < result.unknown_share < 1


def test_command_prints_the_numbers(monkeypatch, tmp_path, capsys):
    texts.use(monkeypatch, tmp_path)
    words = ["kneser_ney", "--order=2", "--letter_order=2", "--format=json"]
    assert kneser_ney.main(words) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    (row,) = table["rows"]
    novels = texts.novels()
    expected = evaluate(word_model(novels.train, 2, 2), novels.test)
    assert row["model"] == "2-gram"
    assert row["word_perplexity"] == pytest.approx(
        expected.word_perplexity, rel=1e-4
    )
