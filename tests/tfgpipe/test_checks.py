"""One idea of what a count is, and a choice, and a path."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.checks import (
    checked_bool,
    checked_choice,
    checked_counts,
    checked_path,
    checked_positive,
)
from tfgpipe.schedules.orders import SCHEDULES
from tfgpipe.schedules.schedule import Schedule


def model(**kwargs):
    items = [keras.Input((2,)), kl.Dense(2, name="a"), kl.Dense(2, name="b")]
    config = tfgpipe.GPipe(items, **kwargs).get_config()
    names = ["num_partitions", "num_micro_batches", "remat_groups"]
    return [config[name] for name in [*names, "layers_per_cell"]]


def assignment(num_replicas, num_partitions):
    topology = tf.tpu.experimental.Topology(
        mesh_shape=[1, 1, 1, 2],
        device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]],
    )
    found = tfgpipe.tpu_device_assignment(
        topology, num_replicas, num_partitions
    )
    return found.core_assignment.tolist()


# What takes the count 2.
TAKERS = {
    "num_partitions": lambda n: model(num_partitions=n),
    "num_micro_batches": lambda n: model(num_partitions=1, num_micro_batches=n),
    "remat_groups": lambda n: model(num_partitions=1, remat_groups=n),
    "layers_per_cell": lambda n: model(num_partitions=1, layers_per_cell=[n]),
    "replicas": lambda n: tfgpipe.PipelineStrategy(n, 1).devices,
    "partitions_of_replicas": lambda n: tfgpipe.PipelineStrategy(1, n).devices,
    "replicas_on_a_tpu": lambda n: assignment(n, 1),
    "partitions_on_a_tpu": lambda n: assignment(1, n),
    **{f"devices_of_{s}": lambda n, s=s: SCHEDULES[s](n, 3) for s in SCHEDULES},
    **{f"schedule_{s}": lambda n, s=s: SCHEDULES[s](3, n) for s in SCHEDULES},
    "chunks": lambda n: SCHEDULES["interleaved"](2, 2, n),
}


def flat(found):
    """All that is in it, with types: files hold no integers of NumPy."""
    nest = found.tasks if isinstance(found, Schedule) else found
    return [(type(leaf), leaf) for leaf in tf.nest.flatten(nest)]


@pytest.mark.parametrize("name", TAKERS)
def test_integer_of_numpy_is_that_of_python(name):
    take = TAKERS[name]
    assert flat(take(np.int64(2))) == flat(take(2))


@pytest.mark.parametrize("value", [True, np.True_, 0, -1, 2.0, "2"])
@pytest.mark.parametrize("name", TAKERS)
def test_what_is_no_count_is_refused(name, value):
    with pytest.raises(ValueError, match="must") as error:
        TAKERS[name](value)
    assert repr(value) in str(error.value)


def test_all_that_are_no_counts_are_named():
    with pytest.raises(ValueError, match=r"`a` .*=0\.\n`c` .*='x'\.$"):
        checked_counts(a=0, b=1, c="x")


class Name(str):
    """A text of a class of its own, as an `enum.StrEnum` has."""


@pytest.mark.parametrize("value", ["gpipe", np.str_("gpipe"), Name("gpipe")])
def test_text_of_any_class_is_a_choice(value):
    found = checked_choice("schedule", value, ["gpipe", "1f1b"])
    assert type(found) is str and found == "gpipe"
    config = tfgpipe.GPipe([kl.Dense(2)], 1, schedule=value).get_config()
    assert type(config["schedule"]) is str


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_booleans_of_numpy_are_those_of_python(value):
    assert checked_bool("x", value) is bool(value)


@pytest.mark.parametrize("value", [1, 0, "True", None, np.zeros(2)])
def test_what_is_no_boolean_is_refused(value):
    with pytest.raises(ValueError, match="`x` must be True or False"):
        checked_bool("x", value)


@pytest.mark.parametrize("value", ["a/b", pathlib.Path("a/b")])
def test_paths_are_texts_or_of_pathlib(value):
    assert checked_path("x", value) == pathlib.Path("a/b")


def test_numbers_of_numpy_are_numbers():
    assert checked_positive("x", np.float32(0.5), "in s") == 0.5
    assert checked_positive("x", np.int64(2), "in s") == 2.0
