"""Reading what a training run left behind."""

import json

import numpy as np
import pytest
import runs

from params.images import ImageSource
from tools.train import trained_run
from tools.train.trainer import Trainer


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)


def change(folder, **values):
    path = folder / "experiment.json"
    saved = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(saved | values), "utf-8")


@pytest.mark.parametrize("k", [1, 3])
def test_model_is_that_of_the_run_in_as_many_cells_as_asked(tmp_path, k):
    trainer = Trainer(runs.IMAGE, 2, tmp_path)
    trainer.fit(verbose=0)
    trainer.export()
    run = trained_run.load(str(tmp_path), k, ImageSource, "images")
    assert run.experiment == runs.IMAGE
    assert run.path == tmp_path / "final.keras"
    assert (run.step, run.model.num_partitions) == (2, k)
    for ours, theirs in zip(
        run.model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_checkpoint_does_until_the_run_is_finished(tmp_path):
    Trainer(runs.IMAGE, 1, tmp_path).fit(verbose=0)
    run = trained_run.load(str(tmp_path), 2)
    assert (run.path.name, run.step) == ("step-0000000001", 1)
    assert run.model.num_partitions == 2


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_missing_folder_is_an_error_with_the_cure(folder):
    with pytest.raises(ValueError, match=r"tools\.train --params=NAME"):
        trained_run.load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "image.tinny"}, "Did you mean 'image.tiny'"),
        ({"model": {"num_units": 3}}, "Perceptron has other fields"),
        ({"model": 3}, "Train again in a new folder"),
    ],
)
def test_run_of_another_version_is_an_error(tmp_path, values, message):
    Trainer(runs.IMAGE, 1, tmp_path)
    change(tmp_path, **values)
    with pytest.raises(ValueError, match=message):
        trained_run.read_experiment(tmp_path)
