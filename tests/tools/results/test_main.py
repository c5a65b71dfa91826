"""The rows of the results: what is refused, trained and compared."""

import dataclasses
import json
import pathlib

import pytest
import runs

from params import registry
from tools.results import __main__ as results
from tools.results import runs as results_runs
from tools.results.runs import Finished


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    """The images of the results, and the text, are tiny ones."""
    runs.use(monkeypatch, tmp_path_factory)
    for name, experiment in {
        "image.amoebanet_d_fashion": runs.IMAGE,
        "lm.austen": runs.LM,
    }.items():
        registered = dataclasses.replace(experiment, name=name)
        monkeypatch.setitem(registry._EXPERIMENTS, name, registered)


def run(*words):
    return results.main(["results", *words])


@pytest.fixture
def tables(tmp_path, capsys):
    def tables(name, *words):
        folder = f"--runs_dir={tmp_path / 'runs'}"
        assert run(name, "--format=json", folder, *words) == 0
        made = json.loads(capsys.readouterr().out)
        return {table["name"]: table for table in made["tables"]}

    return tables


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "must be a sub-command: one of image, lm"),
        (["lm", "--steps=0"], "positive integer"),
    ],
)
def test_bad_flags_fail_before_any_work(words, message, capsys):
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_image_is_trained_twice_once_without_a_pipeline(tables):
    table = tables("image")["image"]
    gpipe, plain = table["rows"]
    assert gpipe["model"] == "GPipe, K=2, M=2"
    assert plain["model"] == "plain Keras"
    assert gpipe["num_params"] == plain["num_params"]
    assert gpipe["num_steps"] == plain["num_steps"] == 12
    for row in (gpipe, plain):
        assert 0 <= row["accuracy"] <= 1


def fake_finish(experiment, values, **options):
    """As if it had been trained, for ten steps."""
    results = {
        "accuracy": 0.5 + 0.1 * experiment.seed,
        "word_perplexity": 99.0,
        "perplexity": 20.0,
        "nll": 3.0,
    }
    folder = pathlib.Path("runs") / experiment.name
    return Finished(experiment, folder, 10, 99, 1.5, results)


def test_language_model_stands_beside_the_n_grams(tables, monkeypatch):
    monkeypatch.setattr(results_runs, "finish", fake_finish)
    transformer, n_grams = tables("lm")["lm"]["rows"]
    assert transformer["word_perplexity"] == 99.0
    assert n_grams["word_perplexity"] == 261.6
