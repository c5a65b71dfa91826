"""The command that tests a trained model."""

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
    again = Trainer(runs.IMAGE, 3).evaluate()  # from the same seed
    assert row["accuracy"] == pytest.approx(again["accuracy"], rel=1e-4)


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
