"""Tiny experiments, and folders of runs of them, for tests of commands."""

import dataclasses
import os
import pathlib
import time

import keras
import numpy as np
import texts

import tfgpipe
from params import datasets, registry
from params.experiment import Experiment
from params.images import Images
from params.lm import TransformerLM
from params.mt import Translation
from params.optimizer import Optimizer
from params.pairs import Pairs
from params.task import LanguageModel
from params.task import Translation as TranslationTask
from params.text import Text
from tfgpipe.checkpoints import writer
from tfgpipe.devices import local
from tools.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Perceptron:
    num_classes: int = 3

    def layers(self):
        return [
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(4, "relu", name="hidden"),
            keras.layers.Dropout(0.2, seed=1, name="dropout"),
            keras.layers.Dense(self.num_classes, "softmax", name="classes"),
        ]


IMAGE = Experiment(
    name="image.tiny",
    description="two dense layers",
    model=Perceptron(),
    data=Images("noise", classes=(0, 1, 2)),
    optimizer=Optimizer("adam", 0.01),
    batch_size=8,
    epochs=3,
    num_partitions=2,
    num_micro_batches=2,
)
LM = Experiment(
    name="lm.tiny",
    description="one block",
    model=TransformerLM(1, 8, 16, 2, 300, 16),
    data=Text(vocab_size=300, length=16),
    task=LanguageModel(),
    optimizer=Optimizer("adam", 0.01),
    batch_size=8,
    epochs=1,
    num_partitions=1,
    num_micro_batches=1,
)
MT = Experiment(
    name="mt.tiny",
    description="one block each",
    model=Translation(1, 8, 16, 2, 320, head_dim=4),
    data=Pairs(vocab_size=320, widths=(64,)),
    task=TranslationTask(),
    optimizer=Optimizer("adam", 0.01),
    batch_size=512,
    epochs=1,
    num_partitions=1,
    num_micro_batches=1,
)
_saved: dict[str, pathlib.Path] = {}


def noise():
    """28 training images of three classes, and 10 test images."""
    rng = np.random.default_rng(0)
    x = rng.random((28, 4, 4, 1), np.float32)
    y = np.arange(28, dtype=np.int32) % 3
    return datasets.ImageDataset(x, y, x[:10], y[:10])


PHASES = {
    "build": (Trainer, "_new_model"),
    "restore": (tfgpipe, "restore"),
    "train": (Trainer, "fit"),
    "save": (writer, "_write_values"),
    "evaluate": (Trainer, "evaluate"),
    "export": (Trainer, "export"),
}


def stop_in(what):
    """Has this process get a signal when a phase begins, such as "build:15"."""
    if what is None:
        return
    phase, number = what.split(":")
    owner, name = PHASES[phase]
    begin = getattr(owner, name)

    def stopped(*args, **kwargs):
        os.kill(os.getpid(), int(number))
        if phase == "save":  # the first one is in `fit`; the disk is slow
            time.sleep(1)
            os.kill(os.getpid(), int(number))
            time.sleep(100)
        return begin(*args, **kwargs)

    setattr(owner, name, stopped)


def use(monkeypatch, tmp_path_factory):
    """Registers the experiments and their data; leaves devices alone."""
    texts.use(monkeypatch, tmp_path_factory.getbasetemp() / "vocabularies")
    monkeypatch.setitem(datasets.LOADERS, "noise", noise)
    for experiment in (IMAGE, LM, MT):
        monkeypatch.setitem(registry._EXPERIMENTS, experiment.name, experiment)
    monkeypatch.setattr(local, "split_cpu", lambda num_devices: None)


def saved(experiment, tmp_path_factory):
    """The folder of a run that has not made a step; once in all tests.

    Its weights are as random as after a few steps, and take no time.
    """
    if experiment.name not in _saved:
        folder = tmp_path_factory.mktemp("run") / "train_dir"
        trainer = Trainer(experiment, 3, folder)
        trainer.model.build_optimizer()
        trainer.export()
        _saved[experiment.name] = folder
    return _saved[experiment.name]
