"""Vocabularies: what they keep of a text, and what is kept of them."""

import pytest
import texts

from params.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    Tokenizer,
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"texts": []}, "`texts` must hold some text"),
        ({"texts": ["", ""]}, "`texts` must hold some text"),
        ({"vocab_size": 262}, "must be more than 262"),
        ({"vocab_size": 263}, "large enough for the characters"),
    ],
)
def test_bad_arguments_are_an_error(tmp_path, given, message):
    given = {"texts": texts.english(), "vocab_size": 300, **given}
    with pytest.raises(ValueError, match=message):
        train_tokenizer(**given, symbols=SYMBOLS, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[text\]'"):
        Tokenizer(b"any")
