"""The trainer: runs, resumes, compares, and refuses bad flags early."""

import dataclasses
import fcntl
import os
import re
import types

import keras
import numpy as np
import pytest
import runs
from absl import flags
from absl.testing import flagsaver
from tiny import Interrupt

import tfgpipe
from params import datasets, registry
from tfgpipe.devices import local
from tfgpipe.monitor import measurements
from tools import devices
from tools.sizes.model_size import num_parameters, predicted
from tools.sizes.parameter_counts import PARAMETER_COUNTS
from tools.train import command as train
from tools.train import comparison, trained_run
from tools.train.trainer import Trainer

DEMO = "image.amoebanet_d_demo"


TINY = runs.IMAGE


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    """Registers TINY and its data; leaves the tests' devices alone."""
    runs.use(monkeypatch, tmp_path_factory)
    monkeypatch.setattr(local, "hide_accelerators", lambda: None)


def run(**given) -> int:
    """Runs the command with these flags."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**given):
        return train.main(["train"])


@pytest.mark.slow
def test_replicas_resume_and_compare_bit_identically(tmp_path, capsys):
    """In one file of checkpoints, whatever the number of cells."""
    given = {"params": "image.tiny", "num_replicas": 2, "seed": 3}
    given |= {"num_micro_batches": 1, "compare_num_partitions": 1}
    folder = str(tmp_path)
    assert run(**given, train_dir=folder) == 0
    out = capsys.readouterr().out
    assert "device:CPU:0 /device:CPU:2" in out
    assert "2 replicas of 2 cells" in out
    assert "after 12 steps from the same initial weights: all" in out
    trained = keras.saving.load_model(tmp_path / "final.keras").get_weights()
    experiment = dataclasses.replace(TINY, num_micro_batches=1, seed=3)
    other = tmp_path / "stopped"
    strategy = devices.strategy(2, experiment)
    with pytest.raises(KeyboardInterrupt):
        Trainer(experiment, None, other, strategy=strategy).fit(
            [Interrupt(2, 2)]
        )
    resumed = Trainer(experiment, None, other, strategy=strategy)
    assert resumed.first_step == 8
    resumed.fit(verbose=0)
    found = comparison.difference(trained, resumed.model.get_weights())
    assert found.num_different == 0
    assert run(params="image.tiny", train_dir=folder) == 2
    assert "only --num_partitions may change" in capsys.readouterr().err
    assert trained_run.read_experiment(tmp_path).seed == 3


def test_run_prints_cells_bubble_and_accuracy(capsys):
    """Of steps that end in the middle of an epoch."""
    assert run(params="image.tiny", steps=6, set=["model.num_classes=7"]) == 0
    out = capsys.readouterr().out
    assert "Perceptron(num_classes=7)" in out
    assert "device:CPU:1" in out
    assert "2 cells and 2 micro-batches, schedule=gpipe: 33%" in out
    assert "Trained 6 steps with num_partitions=2" in out
    assert "Test accuracy: " in out


def test_list_prints_every_experiment_with_its_size(capsys, monkeypatch):
    some = {name: registry.get(name) for name in (DEMO, TINY.name)}
    monkeypatch.setattr(registry, "_EXPERIMENTS", some)
    assert run(list=True) == 0
    out = capsys.readouterr().out
    names, demo, tiny = out.splitlines()
    assert names.split()[:4] == ["name", "parameters", "K", "data"]
    assert demo.split()[:4] == [DEMO, "25,730", "2", "fashion_mnist_12k"]
    assert demo.endswith(some[DEMO].expected_result)
    assert tiny.split()[:4] == [TINY.name, "83", "2", "noise"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if count > 3e4 else ())
        for name, count in PARAMETER_COUNTS.items()
    ],
)
def test_parameters_are_as_written_down(name):
    counted = num_parameters(registry.get(name))
    assert PARAMETER_COUNTS[name] == counted


def test_dry_run_prints_what_each_cell_holds(capsys):
    given = {"params": "image.tiny", "dry_run": True, "num_partitions": 3}
    assert run(**given) == 0
    out = capsys.readouterr().out
    assert "83 parameters, in 3 cells on 3 devices; 2 micro-batches" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == [*"012"]
    assert "Trained" not in out


def test_comparison_that_fails_exits_with_1(capsys, monkeypatch):
    fit = Trainer.fit

    def disturbed(self, *args, **kwargs):
        fit(self, *args, **kwargs)
        if self.model.num_partitions == 1:
            self.model.weights[0].assign_add(self.model.weights[0] * 0 + 1)

    monkeypatch.setattr(Trainer, "fit", disturbed)
    given = {"params": "image.tiny", "compare_num_partitions": 1}
    assert run(**given, steps=2) == 1
    out = capsys.readouterr().out
    assert "after 2 steps from the same initial weights: " in out
    assert "differ, by up to 1" in out


def test_check_stops_before_the_first_step(capsys, monkeypatch, tmp_path):
    """And its exit code says whether all that differs is documented."""
    given = {"params": "image.tiny", "check": True}
    assert run(**given, train_dir=str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "by random numbers for each micro-batch" in out
    assert out.endswith("nothing else differs by more than rounding.\n")
    assert not list(tmp_path.glob("checkpoints/*"))
    unlike = types.SimpleNamespace(is_exact=False)
    monkeypatch.setattr(Trainer, "check", lambda self: unlike)
    assert run(**given) == 1


# Four an epoch.
@pytest.mark.parametrize(
    "steps", [7, pytest.param(None, marks=pytest.mark.slow)]
)
def test_run_resumes_in_the_middle_of_an_epoch(tmp_path, steps):
    whole = Trainer(TINY, steps)
    whole.fit(verbose=0)
    with pytest.raises(KeyboardInterrupt):
        Trainer(TINY, steps, tmp_path).fit(
            [Interrupt(1, 2)], verbose=0, checkpoint_every=5
        )
    resumed = Trainer(TINY, steps, tmp_path)
    assert resumed.first_step == 5
    resumed.fit(verbose=0)
    assert int(resumed.model.optimizer.iterations) == whole.num_steps
    found = comparison.difference(
        whole.model.get_weights(), resumed.model.get_weights()
    )
    assert found.num_different == 0


def test_run_whose_mini_batches_are_not_finite_ends(
    tmp_path, capsys, monkeypatch
):
    """And its last checkpoint is finite, and nothing is exported."""
    x, *others = runs.noise()
    spoiled = datasets.ImageDataset(x * np.nan, *others)
    monkeypatch.setitem(datasets.LOADERS, "noise", lambda: spoiled)
    given = {"params": "image.tiny", "train_dir": str(tmp_path), "epochs": 9}
    assert run(**given) == 4
    error = capsys.readouterr().err
    assert "tools.train: Stopped: the last 10 mini-batches were not" in error
    assert not (tmp_path / "final.keras").exists()
    kept = Trainer(trained_run.read_experiment(tmp_path))
    assert tfgpipe.restore(kept.model, tmp_path / "checkpoints")
    assert all(np.isfinite(w).all() for w in kept.model.get_weights())


def test_pipeline_is_watched(capsys):
    given = {"params": "image.tiny", "pipeline_monitor": True}
    assert run(**given, steps=12) == 0
    printed = capsys.readouterr().out
    assert " - bubble: " in printed
    assert re.findall(r"^Epoch \d: (?:cell|bubble|balanced)", printed, re.M)


def test_train_dir_of_another_run_is_refused(tmp_path, capsys):
    given = {"params": "image.tiny", "train_dir": str(tmp_path)}
    assert run(**given, steps=1) == 0
    changed = {"seed": 1, "set": ["optimizer.learning_rate=0.5"]}
    assert run(**given, steps=1, **changed) == 2
    printed = capsys.readouterr().err
    assert "  seed: 0 there, 1 here\n" in printed
    assert "  optimizer.learning_rate: 0.01 there, 0.5 here\n" in printed
    assert "model" not in printed
    assert "only --num_partitions may change" in printed
    assert run(**given, steps=1) == 0  # is finished
    assert "Trained 0 steps" in capsys.readouterr().out
    assert trained_run.load(tmp_path).step == 1


def test_train_dir_in_use_is_refused_before_anything_is_written(
    tmp_path, capsys
):
    file = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    assert run(params="image.tiny", train_dir=str(tmp_path)) == 2
    assert "in use by another process" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [".lock"]
    os.close(file)
    assert run(params="image.tiny", steps=1, train_dir=str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"params": None},
            "must name an experiment. `python -m tools.train",
        ),
        (
            {"params": "image.tinny"},
            "Received: params='image.tinny'. Did you mean 'image.tiny'? "
            "`python -m tools.train --list` shows all.\n",
        ),
        ({"steps": 1, "epochs": 1}, "must not be given both"),
        (
            {"num_virtual_devices": 1},
            "number of cells, those of all replicas, 2.",
        ),
        ({"workers": "a:1,b"}, "host:port"),
        (
            {"workers": "no.such.invalid:1", "connect_timeout": 1.0},
            "Cannot reach worker 0 at no.such.invalid:1 within 1 s",
        ),
        ({"num_replicas": 5}, "times the micro-batches of each"),
        ({"initial_model": "x.keras"}, "for no other"),
    ],
)
def test_bad_flags_fail_before_any_work(given, message, capsys, tmp_path):
    folder = tmp_path / "new"
    base = {"params": "image.tiny", "train_dir": str(folder)}
    assert run(**{**base, **given}) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not folder.exists()


def held(part):
    """Bytes that the devices hold of TINY, all together."""
    _, prediction = predicted(TINY)
    return sum(part(memory) for memory in prediction.memory)


def test_model_larger_than_the_memory_is_refused_before_it_is_built(
    monkeypatch, capsys
):
    least = held(lambda own: own.weights + own.slots + own.gradients)
    monkeypatch.setattr(measurements, "host_bytes", lambda: least - 1.0)
    monkeypatch.setattr(train, "Trainer", None)  # not reached
    assert run(params=TINY.name) == 2
    error = capsys.readouterr().err
    for text in (
        "image.tiny must fit into the memory of this computer",
        f"predicted for {num_parameters(TINY):,} parameters: weights 0.0,",
        "--dry_run shows",
    ):
        assert text in error
