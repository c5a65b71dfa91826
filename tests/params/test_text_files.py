"""The texts that come with the source, and the errors of damaged files."""

import lzma

import pytest

from params import text_files

PAIRS = "Yes\nNo\nOpen the door\n\nde\t0\tJa\nde\t1\tNein\nfr\t2\tOuvre\n"


@pytest.fixture(scope="module")
def novels():
    return text_files.read_novels()


@pytest.fixture(scope="module")
def pairs():
    return text_files.read_pairs()


def write(path, text):
    path.write_bytes(lzma.compress(text.encode("utf-8")))
    return path


def test_shipped_novels_are_whole(novels):
    words = [
        sum(len(paragraph.split()) for paragraph in part) for part in novels
    ]
    assert sum(words) == 717_537
    assert 0.03 < words[1] / sum(words) < 0.07
    assert novels.train[0] == "EMMA"
    assert any(p.startswith("Emma Woodhouse, handsome") for p in novels.train)
    assert not any("\n" in paragraph for paragraph in novels.train)


def test_thirteen_chapters_of_novels_are_held_out(novels):
    headings = [p for p in novels.test if text_files._CHAPTER.match(p)]
    assert len(headings) == 13
    both = set(novels.test) & set(novels.train)
    assert max(map(len, both)) < 60  # headings, exclamations


def test_shipped_pairs_are_whole(pairs):
    assert len(pairs) == 722_371
    assert len({pair.english for pair in pairs}) <= 23_247
    counts = {}
    for pair in pairs:
        counts[pair.language] = counts.get(pair.language, 0) + 1
    assert len(counts) == 102
    assert (counts["ny"], counts["es"]) == (19, 22_120)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Yes\nNo\n", "no empty line after the English strings"),
        ("Yes\n\n", "no empty line|no pairs"),
        ("Yes\n\nde\t0\n", r"line 3 is 'de\\t0'"),
        ("Yes\n\nde\t0\tJa\tso\n", "line 3 is"),
        ("Yes\n\nde\t0\tJa\nde\t1\tNein\n", "line 4 has the index '1'.*1 Engl"),
        ("Yes\n\nde\t-1\tJa\n", "has the index '-1'"),
        ("Yes\n\nde\t0\t\n", "line 3 is"),
    ],
)
def test_pairs_in_another_format_are_an_error(tmp_path, text, message):
    path = write(tmp_path / "pairs.xz", text)
    with pytest.raises(ValueError, match=message):
        text_files.read_pairs(path)


@pytest.mark.parametrize(
    "read", [text_files.read_novels, text_files.read_pairs]
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not compressed",
        lzma.compress(PAIRS.encode() * 99)[:-9],
        lzma.compress(b"\xff\xfe"),
    ],
)
def test_damaged_file_is_an_error(tmp_path, read, content):
    path = tmp_path / "damaged.xz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"whole xz file.*git checkout"):
        read(path)
