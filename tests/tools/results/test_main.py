"""The rows of the results: what is refused, trained and compared."""

import dataclasses
import json
import pathlib
import types

import pytest
import texts

import params
from params import registry
from tools import kneser_ney
from tools.results import __main__ as results
from tools.results import runs as results_runs
from tools.results.runs import Finished
from tools.text.translation_scores import Translated


def run(*words):
    return results.main(["results", *words])


@pytest.fixture
def tables(tmp_path, capsys):
    def tables(name, *words):
        folders = [f"--runs_dir={tmp_path / 'runs'}", f"--output={tmp_path}"]
        assert run(name, "--format=json", *folders, *words) == 0
        made = json.loads(capsys.readouterr().out)
        return {table["name"]: table for table in made["tables"]}

    return tables


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "must be a sub-command: one of image, transfer"),
        (["imag"], "Did you mean 'image'?"),
        (["lm", "fast"], "only flags. Received: ['fast']"),
        (["lm", "--steps=0"], "positive integer"),
        (["transfer", "--num_runs=0"], "positive integer"),
    ],
)
def test_bad_flags_fail_before_any_work(words, message, capsys):
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_image_is_trained_twice_once_without_a_pipeline(tables, tmp_path):
    table = tables("image")["image"]
    gpipe, plain = table["rows"]
    assert gpipe["model"] == "GPipe, K=2, M=2"
    assert plain["model"] == "plain Keras"
    assert gpipe["num_params"] == plain["num_params"]
    assert gpipe["num_steps"] == plain["num_steps"] == 12
    for row in (gpipe, plain):
        assert 0 <= row["accuracy"] <= 1
    saved = json.loads((tmp_path / "results_image.json").read_text("utf-8"))
    assert saved["tables"][0]["rows"][0]["accuracy"] == pytest.approx(
        gpipe["accuracy"], rel=1e-5
    )
    assert saved["environment"]["tensorflow"]
    png = (tmp_path / "results_image.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def fake_finish(experiment, values, **options):
    """As if it had been trained, for ten steps."""
    results = {
        "accuracy": 0.5 + 0.1 * experiment.seed,
        "word_perplexity": 99.0,
        "perplexity": 20.0,
        "nll": 3.0,
    }
    curves = {name: [(1, 9.0), (10, value)] for name, value in results.items()}
    folder = pathlib.Path("runs") / experiment.name
    return Finished(experiment, folder, 10, 99, 1.5, results, curves)


def test_transfer_starts_from_the_first_model_and_draws_other_examples(
    tables, monkeypatch
):
    calls = []

    def finish(experiment, values, **options):
        calls.append((experiment, options))
        return fake_finish(experiment, values)

    monkeypatch.setattr(results_runs, "finish", finish)
    table = tables("transfer", "--num_runs=2")["transfer"]
    (first, _), *others = calls
    assert first.name == "image.transfer_pretrain"
    assert {options["name"] for _, options in others} == {
        f"image.transfer_{kind}_seed_{seed}"
        for kind in ("finetune", "scratch")
        for seed in range(2)
    }
    final = pathlib.Path("runs/image.transfer_pretrain/final.keras")
    for experiment, options in others:
        assert experiment.data.subset_seed == experiment.seed
        is_tuned = "finetune" in experiment.name
        assert options["initial_model"] == (final if is_tuned else None)
    tuned, scratch = table["rows"]
    assert (tuned["kind"], scratch["kind"]) == ("fine-tuned", "from scratch")
    assert tuned["accuracies"] == [0.5, 0.6]
    assert (tuned["lowest"], tuned["highest"]) == (0.5, 0.6)
    assert tuned["mean"] == pytest.approx(0.55)


def test_language_model_stands_beside_the_n_grams(tables, monkeypatch):
    monkeypatch.setattr(results_runs, "finish", fake_finish)
    ours, theirs = tables("lm", "--order=2")["lm"]["rows"]
    assert ours["word_perplexity"] == 99.0
    assert theirs["model"] == "2-gram Kneser-Ney"
    novels = texts.novels()
    expected = kneser_ney.evaluate(
        kneser_ney.word_model(novels.train, 2), novels.test
    )
    assert theirs["word_perplexity"] == pytest.approx(
        expected.word_perplexity, rel=1e-4
    )


def fake_translated(run, values):
    return [
        Translated("es", f"word number {i} of four", f"word number {i} of all")
        for i in range(5)
    ]


@pytest.fixture
def untrained(monkeypatch):
    pytest.importorskip("sacrebleu")
    monkeypatch.setattr(results_runs, "finish", fake_finish)
    monkeypatch.setattr(results_runs, "translated", fake_translated)


def test_translation_shows_groups_and_five_languages(
    untrained, tables, tmp_path, monkeypatch
):
    class Data:
        to_english = True

        def source(self):
            sizes = {"es": 20000, "de": 9000, "so": 50}
            return types.SimpleNamespace(sizes=sizes)

    for name in ("shallow", "deep", "wide"):
        full = f"mt.multilingual_{name}"
        changed = dataclasses.replace(params.get(full), data=Data())
        monkeypatch.setitem(registry._EXPERIMENTS, full, changed)
    made = tables("translation")
    models = [row["model"] for row in made["models"]["rows"]]
    assert models[:4] == [
        "multilingual shallow",
        "multilingual deep",
        "multilingual wide",
        "bilingual es",
    ]
    assert len(models) == 8
    groups = made["groups"]["rows"]
    assert {row["model"] for row in groups} == set(models[:3])
    assert [row["group"] for row in groups[:2]] == ["10,000 and more", "all"]
    languages = made["languages"]["rows"]
    assert "bilingual" in languages[0]["model"]
    assert {row["language"] for row in languages} == {"es"}
    written = json.loads((tmp_path / "results_translation.json").read_text())
    lines = written["picture"]["lines"]
    label, x, baseline = lines[-1]
    assert label == "bilingual" and len(lines) == 4
    assert x == ["10,000\nand\nmore", "", "es\n20,000"]
    assert baseline[:2] == [None, None]  # a model of no group
    for _, _, y in lines[:3]:
        assert y[1] is None and y[0] == y[2] == baseline[2]


def test_batch_sizes_see_equally_many_examples(untrained, tables, monkeypatch):
    seen = []

    def finish(experiment, values, **options):
        seen.append(experiment)
        return fake_finish(experiment, values)

    monkeypatch.setattr(results_runs, "finish", finish)
    rows = tables("batch_size", "--epochs=4")["batch_size"]["rows"]
    assert {experiment.epochs for experiment in seen} == {4}
    sizes = [row["batch_size"] for row in rows]
    assert sizes == sorted(sizes)
    ratios = {row["batch_size"] / row["num_micro_batches"] for row in rows}
    assert len(ratios) == 1
    assert all(row["nll"] == 3.0 and row["bleu"] > 0 for row in rows)
