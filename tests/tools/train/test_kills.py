"""Runs that are killed again and again end with the same bits as others."""

import random

import numpy as np
import pytest
import runs
from processes import train

import tfgpipe
from params import datasets
from tfgpipe.checkpoints import Folder
from tools.train.trainer import Trainer


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)
    monkeypatch.setitem(datasets.LOADERS, "noise", runs.noise)


def expected_weights(steps):
    trainer = Trainer(runs.IMAGE, steps)
    trainer.fit(verbose=0)
    return trainer.model.get_weights()


def started(tmp_path, folder, steps, every):
    flags = f"--steps={steps}", f"--checkpoint_every={every}"
    return train(tmp_path, *flags, f"--train_dir={folder}")


def assert_ends_with(expected, run, folder):
    assert run.wait() == 0, run.output
    found = tfgpipe.load_model(folder / "final.keras", num_partitions=1)
    for a, b in zip(found.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_no_bit(tmp_path):
    """While it starts, traces, trains or saves."""
    rng, expected = random.Random(0), expected_weights(60)
    num_kills, num_folders = 0, 0
    while num_kills < 50:
        folder = tmp_path / str(num_folders)
        saved = Folder(folder / "checkpoints")
        before, run = saved.steps(), started(tmp_path, folder, 60, 1)
        phase = rng.choice(["start", "train", "train"])
        reached = {
            "start": lambda run=run: "Ideal bubble" in run.output,
            "train": lambda saved=saved, old=before: saved.steps() != old,
        }[phase]
        while not reached() and not run.ends_within(0.01):
            pass
        if run.ends_within(rng.uniform(0, 0.3)):
            final = started(tmp_path, folder, 60, 1)
            assert_ends_with(expected, final, folder)
            num_folders += 1
        else:
            run.kill()
            num_kills += 1
    assert_ends_with(expected, started(tmp_path, folder, 60, 1), folder)
