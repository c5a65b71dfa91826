"""BLEU and chrF by groups of languages."""

import pytest
import runs
import texts

from tools.text import translation_scores as scores
from tools.text.translation_scores import Translated, group_rows, score

sacrebleu = pytest.importorskip("sacrebleu")

SIZES = {"big": 12000, "mid": 3000, "small": 999, "tiny": 20}


def translated(language, count=4, wrong=0):
    """Pairs of which the last ones are wrong."""
    return [
        Translated(
            language,
            f"the {language} reference number {i}, word by word",
            "nothing of it"
            if i >= count - wrong
            else f"the {language} reference number {i}, word by word",
        )
        for i in range(count)
    ]


def test_scores_of_what_is_right_are_full_and_lower_otherwise():
    right = score(translated("de"), to_english=True)
    assert right == {
        "test_pairs": 4,
        "bleu": pytest.approx(100),
        "chrf": pytest.approx(100),
    }
    wrong = score(translated("de", wrong=2), to_english=True)
    assert 0 < wrong["bleu"] < 90 and 0 < wrong["chrf"] < 90


@pytest.mark.parametrize(
    ("language", "to_english", "tokenize"),
    [
        ("de", False, "13a"),
        ("zh", False, "char"),
        ("zh_Hant", False, "char"),
        ("zh-cn", False, "char"),
        ("my", False, "char"),
        ("zh", True, "13a"),
    ],
)
def test_bleu_is_sacrebleus_with_the_cut_of_the_target(
    language, to_english, tokenize
):
    pairs = [
        Translated(language, "今天的天气很好。", "今天天气很好。"),
        Translated(language, "Save, the file!", "Save the file!"),
        Translated(language, "a b c d e f, g.", "a b c d f, g."),
    ]
    expected = sacrebleu.metrics.BLEU(tokenize=tokenize).corpus_score(
        [pair.hypothesis for pair in pairs],
        [[pair.reference for pair in pairs]],
    )
    found = score(pairs, to_english)
    assert found["bleu"] == pytest.approx(expected.score)


def test_pairs_of_a_group_are_scored_as_one_text():
    pairs = [*translated("small", 3, 1), *translated("tiny", 2, 1)]
    pairs += [*translated("mid"), *translated("big", 5, 5)]
    rows = group_rows(pairs, SIZES, True)
    assert [row["group"] for row in rows][-1] == "all"
    assert rows[0] == {
        "group": "under 1,000",
        "num_languages": 2,
        "train_pairs": 1019,
        **score(pairs[:5], True),
    }
    assert rows[-1]["test_pairs"] == len(pairs)
    assert rows[-1]["train_pairs"] == sum(SIZES.values())


class Reverse:
    """Translates `texts.pairs` without a mistake."""

    def __init__(self):
        self.batches = []

    def encode(self, sentences, language):
        assert all(text.startswith(f"{language} ") for text in sentences)
        self.batches.append(sentences)
        return [text[len(language) + 1 :] for text in sentences]

    def translate(self, ids):
        return [text[::-1] for text in ids]


@pytest.mark.parametrize("most", [None, 2])
def test_every_test_pair_is_translated_or_some_of_each_language(
    monkeypatch, tmp_path_factory, most
):
    runs.use(monkeypatch, tmp_path_factory)
    source = runs.MT.data.source()
    reverse = Reverse()
    found = scores.translate_test(source, reverse, True, most)
    assert all(one.reference == one.hypothesis for one in found)
    expected = [(p.language, p.english) for p in source.examples("test")]
    kept = [(one.language, one.reference) for one in found]
    if most is None:
        assert sorted(kept) == sorted(expected)
    else:
        assert set(kept) <= set(expected)
        for language in texts.SIZES:
            own = [one for one in expected if one[0] == language]
            now = [one for one in kept if one[0] == language]
            assert len(now) == min(len(own), most)
    for batch in reverse.batches:
        assert list(map(len, batch)) == sorted(map(len, batch))
