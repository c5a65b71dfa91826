"""A functional model trains in a pipeline as it does by itself."""

import collections
import dataclasses

import h5py
import keras
import numpy as np
import pytest
from beside_keras import assert_close, normal, pipeline, trained
from crossing import sent_tensors
from functional import FUNCTIONAL, MOST, nested, optional
from keras import layers as kl
from keras_versions import MASKED_LOSS_RTOL, NAMES_METRICS_OF_DICTS
from table import Case, assert_file_goes_on, assert_same

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")
QUICK = ("nested", "siamese", "unet")  # of each kind of graph
FEW_LAYERS = {"more_than_its_layers", "wrong_length"}
# Keras takes it that nothing outside of a model wants the mask of its inputs.
MASKS = pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a")


CASES = [
    pytest.param(
        Case(
            name,
            2 if name in FEW_LAYERS else 3,
            MOST.get(name, 3),
            epochs=2,
            infers=name == "siamese",
        ),
        id=name,
        marks=[] if name in QUICK else pytest.mark.slow,
    )
    for name in FUNCTIONAL
]


@MASKS
@pytest.mark.parametrize("case", CASES)
def test_functional_model_trains_as_in_keras_whatever_k(case):
    if case.model == "dicts" and not NAMES_METRICS_OF_DICTS:
        pytest.skip(f"Keras {keras.__version__} refuses the metrics")
    rtol = MASKED_LOSS_RTOL if case.model == "translator" else 1e-10
    assert_same(case, "keras", rtol)


@pytest.mark.slow
@MASKS
@pytest.mark.parametrize("case", CASES)
def test_trained_bits_do_not_depend_on_k(case):
    assert_same(case, dataclasses.replace(case, k=1), 0)


def test_keras_file_goes_on_at_another_k():
    assert_file_goes_on(Case("siamese", 3, 2), num_partitions=2)


def groups(path):
    """The names of all groups of a file."""
    found = set()
    with h5py.File(path) as file:
        file.visit(found.add)
    return found


class Backbone(keras.Model):
    """A functional model that keeps a layer in an attribute, as many do."""

    def __init__(self, **kwargs):
        self.last = keras.layers.Dense(2)
        x = keras.Input((3,))
        h = keras.layers.Dense(3)(x)
        super().__init__(inputs=x, outputs=self.last(h), **kwargs)

    def get_config(self):
        return {"name": self.name}


@pytest.mark.parametrize("make", [nested, Backbone])
def test_weights_files_are_those_of_the_model(make, tmp_path):
    paths = tmp_path / "a.weights.h5", tmp_path / "b.weights.h5"
    model, other = make(), make()
    pipeline = tfgpipe.GPipe(make(), 2, 2)
    model.save_weights(paths[0])
    pipeline.load_weights(paths[0])
    pipeline.save_weights(paths[1])
    other.load_weights(paths[1])
    first, second = map(groups, paths)
    assert second - first == {"random_state", "random_state/vars"}
    assert first <= second
    assert len(pipeline.weights) == len(model.weights)
    for a, b, c in zip(model.weights, pipeline.weights, other.weights):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_skip_is_sent_from_its_maker_once_to_each_cell_that_takes_it():
    """Whatever is in between does not hand it on."""
    x = keras.Input((4,))
    skip = kl.Dense(5)(x)
    h = kl.Dense(3)(skip)
    h = kl.Dense(6)(h)
    both = kl.Concatenate()([h, skip])
    y = kl.Dense(2)(kl.Concatenate()([kl.Dense(7)(both), skip]))
    model = tfgpipe.GPipe(keras.Model(x, y), 4, 2, layers_per_cell=[1, 2, 2, 2])
    model.compile("sgd", "mse")
    m = 2
    sent = collections.Counter(
        (start, end, shape[1:])
        for start, end, shape, name in sent_tensors(model, normal(4), normal(2))
        if name.startswith("PartitionedCall")
    )
    takers = ["CPU:1", "CPU:2", "CPU:3"]
    expected = {("CPU:0", taker, (5,)): m for taker in takers}
    expected["CPU:1", "CPU:2", (6,)] = m
    expected["CPU:2", "CPU:3", (7,)] = m
    assert {k: n for k, n in sent.items() if k[0] < k[1]} == expected


def test_unused_outputs_of_a_nested_model_are_computed():
    """Batch norm moves in a branch that nothing needs."""
    y = keras.Input((3,))
    norm = keras.layers.BatchNormalization(center=False, scale=False)
    inner = keras.Model(y, [keras.layers.Dense(2)(y), norm(y)])

    def make():
        x = keras.Input((3,))
        return keras.Model(x, inner(keras.layers.Dense(3)(x))[0])

    model = tfgpipe.GPipe(make(), 2, 1)
    model.compile("sgd", "mse")
    before = norm.moving_mean.numpy()
    model.fit(normal(3), normal(2), verbose=0)
    assert not np.array_equal(norm.moving_mean.numpy(), before)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("other", [None, normal(4)[::-1]])
def test_optional_input_may_be_left_out(other):
    """A layer that does something else then was opened for both."""
    x, y = [normal(4), other], normal(2)
    found = trained(optional, pipeline(2, 2), x, y)
    # A model inside casts to float32.
    assert_close(found, trained(optional, lambda model: model, x, y), 1e-6)


def test_class_of_the_model_is_restored(tmp_path):
    path = str(tmp_path / "model.keras")
    tfgpipe.GPipe(Backbone(), 2, 2).save(path)
    found = tfgpipe.load_model(path, custom_objects={"Backbone": Backbone})
    assert type(found.model) is Backbone
