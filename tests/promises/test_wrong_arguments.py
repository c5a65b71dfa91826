"""Every argument of the library, given wrongly, is an error that helps."""

import collections
import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe import callbacks, timeline

# What is given by mistake, by the words that tests name it with.
VALUES = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "10**30": 10**30,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "empty text": "",
    "text": "wrong",
    "bytes": b"wrong",
    "[]": [],
    "[None]": [None],
    "['wrong']": ["wrong"],
    "[-1, 0]": [-1, 0],
    "{}": {},
    "{'wrong': -1}": {"wrong": -1},
    "array": np.zeros((2, 2)),
    "tensor": tf.constant([1.5, -1.0]),
    "function": lambda *args: "wrong",
    "class": collections.OrderedDict,
    "object": object(),
}


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


def measure(model, x, num_steps):
    return timeline.measure(model, x, rows(), num_steps=num_steps)


# Of each: what is right where there is no default, or the default is not meant,
# as values or functions that make them; and which of `VALUES` are right.
SPLIT = {"num_partitions": 2, "num_micro_batches": 2}
OF_GPIPE = (
    "devices gradient_dtype head_parts layers_per_cell remat remat_groups "
    "schedule shards skip_nonfinite skip_outliers trial weights_on"
).split()
GIVEN = {
    name: parameter.default
    for name, parameter in inspect.signature(tfgpipe.GPipe).parameters.items()
    if name in OF_GPIPE
}
TARGETS = {
    tfgpipe.GPipe: (
        {"layers": layers, **SPLIT, **GIVEN, "trial": "off"},
        "num_micro_batches: 10**30, None; devices: None; layers_per_cell: "
        "None; remat: {}; remat_groups: None; head_parts: 10**30; shards: "
        "None, {}; gradient_dtype: None; skip_nonfinite: True; skip_outliers: "
        "None; name: None, empty text, text",
    ),
    tfgpipe.PipelineStrategy: (
        {"num_replicas": 2, "num_partitions": 2},
        "devices: None",
    ),
    tfgpipe.PipelineStrategy.from_strategy: (
        {"strategy": one_device, "num_partitions": 1},
        "",
    ),
    tfgpipe.Schedule: ({"tasks": []}, ""),
    tfgpipe.layers_of: ({"model": layers}, ""),
    tfgpipe.profile: (
        {
            "layers": layers,
            "x": rows,
            "y": rows,
            "loss": "mse",
            "micro_batch_sizes": [2],
            "seconds": 0.01,
            "jit_compile": False,
            "verbose": 0,
        },
        "micro_batch_sizes: None; device: None; seconds: 10**30, 1.5; "
        "jit_compile: True; optimizer: None; verbose: True, 0",
    ),
    tfgpipe.plan: (
        {
            "layers": layers,
            "batch_size": 8,
            "devices": 2,
            "machine": "v100",
            "num_replicas": 1,
        },
        "profile: None; devices: None; memory_limit: None, 10**30, inf; "
        "optimizer: None; num_replicas: None; inputs: None",
    ),
    tfgpipe.Machine: (
        {
            "flops": 1e12,
            "memory": 1e9,
            "memory_bandwidth": 1e9,
            "bandwidth": 1e9,
        },
        "flops: 10**30, 1.5; memory: 10**30, 1.5; memory_bandwidth: 10**30, "
        "1.5; bandwidth: 10**30, 1.5; host_bandwidth: 10**30, 1.5; efficiency: "
        "10**30, 1.5; latency: 0, 10**30, 1.5; task_seconds: 0, 10**30, 1.5",
    ),
    callbacks.Checkpoint: (
        {"folder": "checkpoints", "on_signal": False},
        "folder: text; every: None, 10**30; keep: 10**30; best: None, text; "
        "resumed: None; shared: True; on_signal: True",
    ),
    callbacks.StopOnNonFinite: (
        {},
        "steps: 10**30; say: None, function, class",
    ),
    callbacks.PipelineMonitor: (
        {},
        "every: 10**30; log_dir: None, text; pictures: None, text; peak_flops: "
        "None, 10**30, 1.5; flops_of_example: None, 10**30, 1.5; say: None, "
        "function, class",
    ),
    tfgpipe.restore: (
        {"model": trained, "folder": "saved"},
        "folder: text; step: None",
    ),
    tfgpipe.load_model: (
        {"path": "saved.keras", **SPLIT, **GIVEN, "trial": "off"},
        "num_partitions: None; num_micro_batches: None, 10**30; devices: None; "
        "layers_per_cell: None; schedule: None; remat: None, {}; remat_groups: "
        "None; gradient_dtype: None; skip_nonfinite: None, True; "
        "skip_outliers: None; trial: None; weights_on: None; head_parts: None; "
        "shards: None, {}",
    ),
    tfgpipe.plot_cells: ({"model": trained, "to_file": "cells.png"}, ""),
    measure: ({"model": trained, "x": rows, "num_steps": 1}, ""),
}


def arguments(call):
    """Those that are right."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.default is not parameter.empty
    }
    return {**defaults, **TARGETS[call][0]}


# Names of a machine, and what other arguments have objects for.
LEFT_OUT = {
    *((tfgpipe.Machine, name) for name in ("name", "flops_by_dtype")),
    *((tfgpipe.plan, name) for name in ("setting", "margin", "jit_compile")),
    (callbacks.PipelineMonitor, "plan"),
}
CASES = [
    (call, name)
    for call in TARGETS
    for name in arguments(call)
    if (call, name) not in LEFT_OUT
]
# Nothing is traced to find out.
QUICK = (tfgpipe.GPipe, tfgpipe.Machine, callbacks.Checkpoint)


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


def unclear(error, argument):
    """Why an error is none that helps; None if it does."""
    kinds = (ValueError, TypeError, OSError)
    if not isinstance(error, kinds) or isinstance(error, UnicodeError):
        return f"a {type(error).__name__}"
    text = str(error)
    if f"`{argument}`" not in text and f"{argument}=" not in text:
        return "without the argument's name"
    return None if "eceived" in text else "without what was received"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        pytest.param(
            call,
            name,
            id=f"{call.__qualname__}-{name}",
            marks=[] if call in QUICK else pytest.mark.slow,
        )
        for call, name in CASES
    ],
)
def test_wrong_value_is_an_error_that_helps(call, argument, request):
    if call not in QUICK:
        request.getfixturevalue("saved")
    pairs = (p.split(": ") for p in TARGETS[call][1].split("; ") if p)
    accepted = dict(pairs).get(argument, "").split(", ")
    for word, value in VALUES.items():
        if (argument, word) == ("num_steps", "10**30"):
            continue  # it would do them
        given = {
            name: right() if inspect.isfunction(right) else right
            for name, right in arguments(call).items()
            if name != argument
        }
        said = None
        try:
            functools.partial(call, **given, **{argument: value})()
        except Exception as error:
            said = error
        assert said is None or unclear(said, argument) is None, (word, said)
        assert (said is None) == (word in accepted), (word, said)
