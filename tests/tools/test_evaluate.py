"""The command that tests a trained model."""

import csv
import io
import json

import pytest
import runs

from tools import evaluate
from tools.train import trained_run
from tools.train.trainer import Trainer


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)


def run(folder, *words):
    return evaluate.main(["evaluate", f"--train_dir={folder}", *words])


def tables(capsys, folder, *words):
    assert run(folder, "--format=json", *words) == 0
    made = json.loads(capsys.readouterr().out)
    return {table["name"]: table["rows"] for table in made["tables"]}


def test_numbers_are_those_of_the_training_run(tmp_path_factory, capsys):
    folder = runs.saved(runs.IMAGE, tmp_path_factory)
    (row,) = tables(capsys, folder)["test"]
    assert (row["experiment"], row["step"]) == ("image.tiny", 0)
    expected = evaluate.evaluate(trained_run.load(str(folder)))
    again = Trainer(runs.IMAGE, 3).evaluate()  # from the same seed
    assert row["accuracy"] == pytest.approx(again["accuracy"], rel=1e-4)
    assert expected == pytest.approx(again)


def test_translations_are_scored_by_group(tmp_path_factory, capsys):
    pytest.importorskip("sacrebleu")
    folder = runs.saved(runs.MT, tmp_path_factory)
    found = tables(capsys, folder, "--beam_size=1", "--max_pairs=3")
    assert found["test"][0]["nll"] > 0
    source = trained_run.load(str(folder)).source
    (row,) = found["groups"]  # all languages are small
    assert row["num_languages"] == len(source.languages)
    assert 0 <= row["bleu"] <= 100 and 0 <= row["chrf"] <= 100
    assert 0 < row["test_pairs"] <= 3 * len(source.languages)
    assert "languages" not in found


class Silent(evaluate.Translator):
    def translate(self, ids):
        return [""] * len(ids)


def test_rows_of_all_tables_are_in_one_csv(
    tmp_path_factory, monkeypatch, capsys
):
    pytest.importorskip("sacrebleu")
    folder = runs.saved(runs.MT, tmp_path_factory)
    monkeypatch.setattr(evaluate.scores, "_LEAST_PAIRS", 25)
    monkeypatch.setattr(evaluate, "evaluate", lambda run: {"nll": 2.0})
    monkeypatch.setattr(evaluate, "Translator", Silent)
    assert run(folder, "--format=csv", "--by_language") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    kinds = [row["table"] for row in rows]
    assert kinds == ["test", "groups", "languages", "languages"]
    assert [row["language"] for row in rows[2:]] == ["aa", "bb"]
    assert rows[0]["nll"] == "2.0"
    assert rows[1]["chrf"] == "0.0"
