"""Every argument of the library, given wrongly, is an error that helps."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from wrong_values import VALUES, outcome

import tfgpipe
from tfgpipe import callbacks, timeline


def layers():
    return [keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)]


def rows():
    return np.ones((4, 4), "float32")


def trained():
    model = tfgpipe.GPipe(layers(), 2, 2)
    model.compile("sgd", "mse")
    return model


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:0")


PLAIN = {
    "num_partitions": 2,
    "num_micro_batches": 2,
    "devices": None,
    "layers_per_cell": None,
    "schedule": "gpipe",
    "remat": "never",
    "remat_groups": 1,
    "gradient_dtype": None,
    "skip_nonfinite": False,
    "skip_outliers": None,
    "trial": "off",
    "weights_on": "devices",
    "head_parts": 1,
    "shards": None,
}


class Target:
    """Something to call, and arguments that are right.

    Args:
        call: Takes the arguments by name.
        right: Values, or functions that make them.
        accepted: Which of `VALUES` are right, by argument.
    """

    def __init__(self, call, right, accepted):
        self.call, self.right = call, right
        pairs = (part.split(": ") for part in accepted.split("; ") if part)
        self.accepted = {name: words.split(", ") for name, words in pairs}

    def __call__(self, **wrong):
        made = {
            name: value() if callable(value) else value
            for name, value in self.right.items()
            if name not in wrong
        }
        return self.call(**made, **wrong)


TARGETS = {
    "GPipe": Target(
        tfgpipe.GPipe,
        {"layers": layers, **PLAIN, "costs": "flops", "name": None},
        (
            "num_micro_batches: 10**30, None; devices: None; "
            "layers_per_cell: None; remat: {}; remat_groups: None; "
            "head_parts: 10**30; shards: None, {}; gradient_dtype: "
            "None; skip_nonfinite: True; skip_outliers: None; name: "
            "None, empty text, text"
        ),
    ),
    "PipelineStrategy": Target(
        tfgpipe.PipelineStrategy,
        {"num_replicas": 2, "num_partitions": 2, "devices": None},
        "devices: None",
    ),
    "from_strategy": Target(
        tfgpipe.PipelineStrategy.from_strategy,
        {"strategy": one_device, "num_partitions": 1},
        "",
    ),
    "Schedule": Target(tfgpipe.Schedule, {"tasks": []}, ""),
    "layers_of": Target(tfgpipe.layers_of, {"model": layers}, ""),
    "profile": Target(
        tfgpipe.profile,
        {
            "layers": layers,
            "x": rows,
            "y": rows,
            "loss": "mse",
            "micro_batch_sizes": [2],
            "device": None,
            "seconds": 0.01,
            "jit_compile": False,
            "optimizer": "adam",
            "verbose": 0,
        },
        (
            "micro_batch_sizes: None; device: None; seconds: 10**30, "
            "1.5; jit_compile: True; optimizer: None; verbose: True, 0"
        ),
    ),
    "plan": Target(
        tfgpipe.plan,
        {
            "layers": layers,
            "batch_size": 8,
            "profile": None,
            "devices": 2,
            "memory_limit": None,
            "machine": "v100",
            "optimizer": "adam",
            "num_replicas": 1,
            "inputs": None,
        },
        (
            "profile: None; devices: None; memory_limit: None, 10**30, "
            "inf; optimizer: None; num_replicas: None; inputs: None"
        ),
    ),
    "Machine": Target(
        tfgpipe.Machine,
        {
            "flops": 1e12,
            "memory": 1e9,
            "memory_bandwidth": 1e9,
            "bandwidth": 1e9,
            "latency": 0.0,
            "task_seconds": 0.0,
            "efficiency": 0.5,
        },
        (
            "flops: 10**30, 1.5; memory: 10**30, 1.5; memory_bandwidth: "
            "10**30, 1.5; bandwidth: 10**30, 1.5; latency: 0, 10**30, "
            "1.5; task_seconds: 0, 10**30, 1.5"
        ),
    ),
    "Checkpoint": Target(
        callbacks.Checkpoint,
        {
            "folder": "checkpoints",
            "every": None,
            "keep": 3,
            "best": None,
            "mode": "auto",
            "resumed": None,
            "shared": True,
            "on_signal": False,
        },
        (
            "folder: text; every: None, 10**30; keep: 10**30; best: "
            "None, text; resumed: None; shared: True; on_signal: True"
        ),
    ),
    "StopOnNonFinite": Target(
        callbacks.StopOnNonFinite,
        {"steps": 2, "say": None},
        "steps: 10**30; say: None, function, class",
    ),
    "PipelineMonitor": Target(
        callbacks.PipelineMonitor,
        {
            "every": 1,
            "log_dir": None,
            "pictures": None,
            "peak_flops": None,
            "flops_of_example": None,
            "say": None,
        },
        (
            "every: 10**30; log_dir: None, text; pictures: None, text; "
            "peak_flops: None, 10**30, 1.5; flops_of_example: None, "
            "10**30, 1.5; say: None, function, class"
        ),
    ),
    "restore": Target(
        tfgpipe.restore,
        {"model": trained, "folder": "saved", "step": None},
        "folder: text; step: None",
    ),
    "load_model": Target(
        tfgpipe.load_model,
        {"path": "saved.keras", **PLAIN},
        (
            "num_partitions: None; num_micro_batches: None, 10**30; "
            "devices: None; layers_per_cell: None; schedule: None; "
            "remat: None, {}; remat_groups: None; gradient_dtype: None; "
            "skip_nonfinite: None, True; skip_outliers: None; trial: "
            "None; weights_on: None; head_parts: None; shards: None, {}"
        ),
    ),
    "plot_cells": Target(
        tfgpipe.plot_cells, {"model": trained, "to_file": "cells.png"}, ""
    ),
    "measure": Target(
        lambda **given: timeline.measure(y=rows(), **given),
        {"model": trained, "x": rows, "num_steps": 1},
        "",
    ),
}


CASES = [
    (name, argument) for name, t in TARGETS.items() for argument in t.right
]
# Nothing is traced to find out.
QUICK = ("GPipe", "Machine", "Checkpoint")


def test_there_are_as_many_as_promised():
    assert len(CASES) * len(VALUES) > 1000


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with a file, to work in."""
    monkeypatch.chdir(tmp_path)
    model = trained()
    model.save("saved.keras")
    save = callbacks.Checkpoint("saved")
    model.fit(rows(), rows(), verbose=0, callbacks=[save])


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        case
        if case[0] in QUICK
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_wrong_value_is_an_error_that_helps(name, argument):
    target = TARGETS[name]
    for word, value in VALUES.items():
        if (argument, word) == ("num_steps", "10**30"):
            continue  # it would do them
        found = outcome(
            functools.partial(target, **{argument: value}), argument
        )
        assert found.unclear is None, (word, found.error)
        assert found.is_accepted == (word in target.accepted.get(argument, ()))
