"""Training runs of the results: each is done once."""

import copy
import dataclasses

import keras
import pytest
import runs

from tools.results import image, translation
from tools.results import runs as results_runs
from tools.results.image import PlainTrainer
from tools.results.runs import Finished
from tools.train.trainer import Trainer


def parsed(module, *words):
    values = copy.deepcopy(module.FLAGS)
    values(["results", *words])
    return values


@pytest.fixture
def finish(tmp_path):
    def finish(*words, experiment=runs.IMAGE, **options):
        values = parsed(image, f"--runs_dir={tmp_path}", *words)
        return results_runs.finish(experiment, values, **options)

    return finish


class NoTrainer(Trainer):
    def fit(self, *args, **kwargs):
        raise AssertionError("trained again")


def test_finished_run_is_not_trained_again(finish):
    first = finish()
    assert first.num_steps == 12
    assert finish(maker=NoTrainer) == first
    other_text = dataclasses.replace(runs.IMAGE, expected_result="better")
    again = finish(maker=NoTrainer, experiment=other_text)
    assert again.results == first.results


class Interrupted(PlainTrainer):
    """Is stopped in its second epoch."""

    def fit(self, callbacks, **options):
        class Stop(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    raise KeyboardInterrupt

        super().fit([*callbacks, Stop()], **options)


@pytest.mark.slow
def test_interrupted_run_goes_on(finish):
    whole = finish(name="whole", maker=PlainTrainer)
    with pytest.raises(KeyboardInterrupt):
        finish(name="parts", maker=Interrupted)
    parts = finish(name="parts", maker=PlainTrainer)
    assert parts.results == whole.results
    assert parts.minutes > 0


def test_translations_are_kept(tmp_path_factory, tmp_path, monkeypatch):
    folder = runs.saved(runs.MT, tmp_path_factory)
    run = Finished(runs.MT, folder, 0, 0, 0.0, {})
    words = ["--beam_size=1", "--max_pairs=2"]
    values = parsed(translation, *words)
    found = results_runs.translated(run, values)
    assert {one.language for one in found} == {"aa", "bb"}

    def load(folder):
        raise AssertionError("translated again")

    monkeypatch.setattr(results_runs.trained_run, "load", load)
    assert results_runs.translated(run, values) == found
    (folder / "translations.json").unlink()
