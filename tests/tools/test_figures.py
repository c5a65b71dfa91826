"""Figures in pages are those of their files."""

import pytest

from tools import figures


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_tables_and_numbers_of_page_are_those_of_the_files(page):
    text = page.read_text("utf-8")
    assert figures.with_tables(text) == text, "run python -m tools.figures"
    assert list(figures.wrong_quotes(text)) == []
    # No mark is malformed, or it would not be compared.
    assert text.count("<!-- figure: ") == text.count("<!-- /figure -->")


def test_files_are_shown_or_quoted():
    text = "".join(page.read_text("utf-8") for page in figures.pages())
    names = {path.stem for path in figures.FOLDER.glob("*.json")}
    assert {n for n in names if f"<!-- figure: {n} -->" not in text} == {
        n for n in names if f"<!-- {n}; " in text
    } - {n for n in names if f"<!-- figure: {n} -->" in text}


@pytest.fixture
def figure(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    head = {"title": "Steps", "commit": "abc1234", "notes": ["A note."]}
    rows = [["gpipe", "1,024.5", "3", "12%"], ["1f1b", "7", "4", "9.6%"]]
    figures.write("steps", head, ["schedule", "ms", "25%", "idle"], rows)


def test_table_is_written_between_its_marks(figure):
    page = "A\n<!-- figure: steps -->\nold\n<!-- /figure -->\nB\n"
    new = figures.with_tables(page)
    assert new == (
        "A\n<!-- figure: steps -->\n"
        "| schedule | ms | idle |\n| --- | --- | --- |\n"
        "| gpipe | 1,024.5 | 12% |\n| 1f1b | 7 | 9.6% |\n\n"
        "Steps. A note. Measured at `abc1234`.\n<!-- /figure -->\nB\n"
    )
    assert figures.with_tables(new) == new


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("1,024.5<!-- steps; schedule=gpipe: ms -->", False),
        ("1,024<!-- steps; schedule=gpipe: ms -->", False),
        ("10%<!-- steps; schedule=1f1b: idle -->", False),
        ("7.1<!-- steps; schedule=1f1b: ms -->", True),
        ("7<!-- steps; schedule=other: ms -->", True),
        ("12<!-- steps; schedule=gpipe: idle -->", True),
    ],
)
def test_number_is_compared_with_the_row_that_it_names(figure, text, is_wrong):
    assert bool(list(figures.wrong_quotes(f"About {text} of it."))) == is_wrong
