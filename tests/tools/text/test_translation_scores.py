"""BLEU and chrF by groups of languages."""

import pytest

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


@pytest.mark.parametrize(
    ("language", "to_english", "tokenize"),
    [
        ("de", False, "13a"),
        ("zh", False, "char"),
        ("zh_Hant", False, "char"),
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
