"""Vocabularies: what they keep of a text, and what is kept of them."""

import pytest
import texts

from params.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    train_tokenizer,
)

SYMBOLS = ("<2en>", "<de>")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return train_tokenizer(
        texts.english(),
        330,
        symbols=SYMBOLS,
        cache_dir=tmp_path_factory.mktemp("vocabulary"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "item3 kalo mi",
        "never seen: Ünïcödé, ქართული, 日本語 🙂",
        "“quotes” … %(name)s {entity}",
        "ﬁ is not fi",
    ],
)
def test_any_text_comes_back(learnt, text):
    (ids,) = learnt.encode([text])
    assert max(ids) < learnt.vocab_size <= 330
    assert learnt.decode([ids]) == [text]


def test_decoding_ends_before_the_end_and_drops_symbols(learnt):
    (ids,) = learnt.encode(["item3"])
    (more,) = learnt.encode(["item4"])
    row = [BOS_ID, learnt.symbol_id("<de>"), *ids, EOS_ID, *more]
    assert learnt.decode([row, [PAD_ID], [EOS_ID], []]) == ["item3", "", "", ""]


def test_vocabulary_is_the_same_each_time(tmp_path):
    models = {
        train_tokenizer(texts.english(), 300, cache_dir=tmp_path / name).model
        for name in ("a", "b")
    }
    assert len(models) == 1


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_damaged_kept_vocabulary_is_learnt_again(tmp_path, content):
    first = train_tokenizer(texts.english(), 300, cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    again = train_tokenizer(texts.english(), 300, cache_dir=tmp_path)
    assert again.model == first.model == path.read_bytes()
