"""What a run writes for TensorBoard, and tests in between."""

import dataclasses

import numpy as np
import pytest
import runs
from scalars import read_log
from tiny import Interrupt

from params import datasets
from tools.train.monitor import Monitor
from tools.train.trainer import Trainer


@pytest.fixture(autouse=True)
def noise(monkeypatch):
    monkeypatch.setitem(datasets.LOADERS, "noise", runs.noise)


def test_resumed_run_goes_on_with_the_steps_of_its_checkpoint(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    trainer = Trainer(runs.IMAGE, train_dir=folder)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit([Monitor(trainer, log, 2), Interrupt(2, 3)], verbose=0)
    before = read_log(log)
    assert [step for step, _ in before["test/accuracy"]] == [2, 4, 6, 8, 10]
    for path in log.iterdir():  # what a killed process leaves
        path.write_bytes(path.read_bytes()[:-7])
    resumed = Trainer(runs.IMAGE, train_dir=folder)
    assert resumed.first_step == 8
    resumed.fit([Monitor(resumed, log, 2)], verbose=0)
    after = read_log(log)
    assert [step for step, _ in after["train/loss"]] == [12]
    assert after["test/accuracy"][:5] == before["test/accuracy"]
    assert [step for step, _ in after["test/accuracy"]] == [*range(2, 13, 2)]
    rate = runs.IMAGE.optimizer.make(12)
    rate.iterations.assign(12)
    assert after["learning_rate"] == [(12, float(rate.learning_rate))]
    assert read_log(tmp_path / "none") == {}


def test_tests_in_between_leave_no_trace_in_the_training(capsys):
    weights, histories = [], []
    for every in (None, 1):
        trainer = Trainer(dataclasses.replace(runs.IMAGE, epochs=1))
        trainer.fit([Monitor(trainer, None, every)], verbose=0)
        weights.append(trainer.model.get_weights())
        histories.append(trainer.model.history.history)
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert histories[0] == histories[1]
    last = f"accuracy {trainer.evaluate()['accuracy']:.4g}"
    assert capsys.readouterr().out.splitlines()[-1].endswith(last)
