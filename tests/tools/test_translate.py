"""The command that translates, and the translator behind it."""

import io
import sys

import pytest
import runs

from tools import translate
from tools.translate import Translator


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)


@pytest.fixture
def folder(tmp_path_factory):
    return runs.saved(runs.MT, tmp_path_factory)


def run(folder, *words):
    return translate.main(["translate", f"--train_dir={folder}", *words])


@pytest.fixture
def echo(monkeypatch):
    """A translator that writes what it reads, with its language."""
    calls = []

    class Echo(Translator):
        def translate(self, ids):
            calls.append(len(ids))
            return [
                f"<{t}>" for t in self._source.tokenizer.decode(ids.tolist())
            ]

    monkeypatch.setattr(translate, "Translator", Echo)
    return calls


def test_lines_are_translated_alike_in_several_cells(folder, capsys):
    texts = [f"--text={text}" for text in ("kalo mi", "", "nu", "pera so ti")]
    found = []
    for flags in ([], ["--num_partitions=2"], ["--num_partitions=3"]):
        assert run(folder, "--language=aa", *texts, *flags) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] == found[2] != "\n" * 4


def test_lines_come_back_in_order_and_empty_ones_stay_empty(
    folder, echo, monkeypatch, capsys
):
    lines = "kalo\n\nmi nu\n   \npera so\nti\nvu\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert run(folder, "--language=bb", "--batch_size=3") == 0
    captured = capsys.readouterr()
    assert captured.out == "<kalo>\n\n<mi nu>\n\n<pera so>\n<ti>\n<vu>\n"
    assert echo == [2, 2, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of aa, bb, cc. Received: no flag"),
        (["--language=dd"], "Received: --language=dd"),
    ],
)
def test_bad_flags_are_refused(folder, words, message, capsys):
    assert run(folder, "--text=mi", *words) == 2
    assert message in capsys.readouterr().err
