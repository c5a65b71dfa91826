"""Replicas of an interleaved pipeline on workers, in a process of its own.

python tests/mixed.py --workers=HOST:PORT,HOST:PORT FOLDER

R = 2 replicas of K = 4 cells on two devices each: those of a replica are on a
worker of its own. It leaves the trained model, and the values of its variables.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from tiny import (
    assert_close,
    compiled,
    data,
    fit,
    pipeline,
    random_layers,
    state,
)

import tfgpipe
from tfgpipe.hosts import addresses, controller


def replicas(devices=None):
    """A model whose numbers are those of one pipeline of 4 micro-batches."""
    keras.utils.set_random_seed(5)
    with tfgpipe.PipelineStrategy(2, 2, devices).scope():
        return compiled(
            tfgpipe.GPipe(
                random_layers(),
                num_partitions=4,
                num_micro_batches=2,
                schedule="interleaved",
            )
        )


def numbers(model):
    """Everything that training changes."""
    cells = model.built_for("a test").cells
    seeds = [v.numpy() for cell in cells for v in cell.seeds]
    return [*state(model), *seeds]


def one_pipeline():
    """What `replicas` is to be; trained."""
    model = compiled(pipeline(random_layers, 1, 4))
    fit(model, *data())
    return model


def assert_goes_on(path, one):
    """Training goes on from a file of another grid as one pipeline does."""
    with tfgpipe.PipelineStrategy(4, 1).scope():
        loaded = tfgpipe.load_model(
            path, num_partitions=1, num_micro_batches=1, schedule="gpipe"
        )
    assert (loaded.num_replicas, loaded.num_partitions) == (4, 1)
    for model in (loaded, one):
        fit(model, *data(), initial_epoch=2, epochs=4)
    assert_close(numbers(loaded), numbers(one))


def main(workers, folder):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    found = addresses.of_workers(workers.removeprefix("--workers="))
    with controller.Cluster(found, 4) as connected:
        model = replicas(connected.devices)
        fit(model, *data())
        model.save(os.path.join(folder, "model.keras"))
        path = os.path.join(folder, "numbers.npz")
        np.savez(path, *numbers(model))
        print([cell.devices for cell in model.cells()])


if __name__ == "__main__":
    main(*sys.argv[1:])
