"""The trainer on texts, and from a trained model."""

import dataclasses

import numpy as np
import pytest
import runs
from tiny import Interrupt

from params.images import Images
from tools.train import comparison
from tools.train.trainer import Trainer

LM, MT = (
    dataclasses.replace(
        experiment, epochs=2, num_partitions=2, num_micro_batches=2
    )
    for experiment in (runs.LM, runs.MT)
)
IMAGE = dataclasses.replace(
    runs.IMAGE, name="image.first", data=Images("noise"), epochs=1
)
SECOND = dataclasses.replace(
    IMAGE,
    name="image.second",
    model=runs.Perceptron(2),
    data=Images("noise", classes=(1, 2)),
    num_partitions=1,
    starts_from="image.first",
)


@pytest.fixture(autouse=True)
def little(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [LM, MT], ids=["lm", "mt"])
def test_interrupted_text_run_resumes_bit_identically(tmp_path, experiment):
    whole = Trainer(experiment)
    whole.fit(verbose=0)
    results = whole.evaluate()
    chance = experiment.model.vocab_size
    assert 1 < results["perplexity"] < chance
    with pytest.raises(KeyboardInterrupt):
        Trainer(experiment, train_dir=tmp_path).fit([Interrupt(1)], verbose=0)
    resumed = Trainer(experiment, train_dir=tmp_path)
    assert 0 < resumed.first_step < resumed.num_steps
    resumed.fit(verbose=0)
    found = comparison.difference(
        whole.model.get_weights(), resumed.model.get_weights()
    )
    assert found.num_different == 0
    assert resumed.evaluate() == results


def test_trained_layers_are_the_start_of_another_run(tmp_path):
    first = Trainer(IMAGE, train_dir=tmp_path)
    first.fit(verbose=0)
    path = first.export()
    second = Trainer(SECOND, initial_model=path)
    trained, started = (
        {layer.name: layer.get_weights() for layer in t.model.layers}
        for t in (first, second)
    )
    np.testing.assert_array_equal(trained["hidden"][0], started["hidden"][0])
    assert started["classes"][0].shape == (4, 2)
    second.fit(verbose=0)
    assert 0 <= second.evaluate()["accuracy"] <= 1


def test_start_without_a_trained_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"Expected: image\.first"):
        Trainer(SECOND)
    with pytest.raises(FileNotFoundError, match=r"Train image\.first"):
        Trainer(SECOND, initial_model=tmp_path / "none.keras")
