"""A functional model trains in a pipeline as it does by itself."""

import collections

import h5py
import keras
import numpy as np
import pytest
from beside_keras import ROWS, assert_close, normal, pipeline, trained
from crossing import sent_tensors
from functional import (
    Noise,
    captcha,
    closure_beside,
    dicts,
    encoder,
    masked,
    masked_inside,
    named_outputs,
    nested,
    normalized,
    normed_beside,
    opened_beside,
    optional,
    residual,
    reused,
    scaled_beside,
    siamese,
    translator,
    unet,
    unmasked,
    wrong_length,
)
from keras import layers as kl
from keras_versions import MASKED_LOSS_RTOL, NAMES_METRICS_OF_DICTS
from quick import quick

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


def tokens(length, size):
    return np.random.default_rng(length).integers(0, size, (ROWS, length))


def two_outputs():
    return {"value": normal(2), "label": normal(3)}


LOSSES = {
    "loss": {"value": "mse", "label": "mae"},
    "loss_weights": {"value": 0.5, "label": 2.0},
    "metrics": {"label": ["mse"]},
}
# Model, inputs, labels, arguments of `compile`, largest M that is exact.
CASES = {
    "unet": (unet, normal(8, 8, 2), normal(8, 8, 1), {}, 3),
    "residual": (residual, normal(5), normal(2), {}, 3),
    "siamese": (siamese, [normal(4), normal(4)[::-1]], normal(1), {}, 3),
    "siamese by names": (
        siamese,
        {"b": normal(4)[::-1], "a": normal(4)},
        normal(1),
        {},
        3,
    ),
    "dicts": (
        dicts,
        {"z": normal(3), "a": normal(2)},
        two_outputs(),
        LOSSES,
        3,
    ),
    "named outputs": (named_outputs, normal(5), two_outputs(), LOSSES, 3),
    "translator": (
        translator,
        [tokens(6, 9), tokens(5, 9)],
        normal(5, 3),
        {},
        3,
    ),
    "nested": (nested, tokens(4, 9), normal(8), {}, 3),
    "reused": (reused, [normal(4), normal(4)[::-1]], normal(20), {}, 3),
    "masked": (masked, tokens(6, 9), normal(2), {}, 3),
    "masked inside": (masked_inside, tokens(6, 9), normal(2), {}, 3),
    "unmasked": (
        unmasked,
        tokens(6, 9),
        [normal(6, 2), normal(6, 4), normal(6, 3)],
        {"loss": ["mse"] * 3},
        3,
    ),
    "captcha": (captcha, [1 + tokens(2, 4), normal(6, 4)], normal(4, 5), {}, 1),
    "normalized": (normalized, normal(5), normal(2), {}, 1),
    "opened": (encoder, normal(5, 4), normal(2), {}, 1),
}


# The others have data or outputs by name, or moments.
TRAINED = [
    *"unet residual siamese dicts translator nested reused masked".split(),
    *("masked inside", "unmasked", "opened"),
]


def by_itself(make, x, y, arguments):
    """What plain Keras makes of the model."""
    return trained(make, lambda model: model, x, y, **arguments)


# Keras takes it that nothing outside of a model wants the mask of its inputs.
@pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a mask")
@pytest.mark.parametrize("name", quick(CASES, TRAINED))
def test_functional_model_trains_as_in_keras_whatever_k(name):
    if name == "dicts" and not NAMES_METRICS_OF_DICTS:
        pytest.skip(f"Keras {keras.__version__} refuses the metrics")
    make, x, y, arguments, m = CASES[name]
    found = trained(make, pipeline(3, m), x, y, **arguments)
    rtol = MASKED_LOSS_RTOL if name == "translator" else 1e-10
    assert_close(found, by_itself(make, x, y, arguments), rtol)
    if name in QUICK:
        assert_same_bits(
            found, trained(make, pipeline(1, m), x, y, **arguments)
        )


QUICK = ["residual", "siamese"]  # compared at another K, too


def assert_same_bits(found, expected):
    for a, b in zip(*map(keras.tree.flatten, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


# The quick ones are compared with Keras and with one cell at once, above.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a mask")
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_trained_bits_do_not_depend_on_k(name):
    make, x, y, arguments, m = CASES[name]
    assert_same_bits(
        *(trained(make, pipeline(k, m), x, y, **arguments) for k in (1, 3))
    )


@pytest.mark.parametrize(
    "schedule",
    [pytest.param("1f1b", marks=pytest.mark.slow), "zero_bubble"],
)
def test_skips_under_other_schedules(schedule):
    make, x, y, arguments, m = CASES["unet"]
    found = trained(make, pipeline(3, m, schedule=schedule), x, y, **arguments)
    assert_close(found, by_itself(make, x, y, arguments))


@pytest.mark.parametrize(
    ("replicas", "eagerly"), quick([(2, False), (1, True)], [(2, False)])
)
def test_skips_in_replicas_and_eagerly(replicas, eagerly):
    make, x, y, arguments, m = CASES["unet"]
    expected = by_itself(make, x, y, arguments)
    with tfgpipe.PipelineStrategy(replicas, 2).scope():
        model = pipeline(2, m)
        found = trained(make, model, x, y, **arguments, run_eagerly=eagerly)
    assert_close(found, expected)


def test_model_itself_has_what_was_trained():
    model = unet()
    paths = [v.path for v in model.weights]
    pipeline = tfgpipe.GPipe(model, 2, 2)
    pipeline.compile("sgd", "mse")
    pipeline.fit(normal(8, 8, 2), normal(8, 8, 1), verbose=0)
    x = normal(8, 8, 2)
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), pipeline(x).numpy()
    )
    assert [id(v) for v in model.weights] == [id(v) for v in pipeline.weights]
    assert [v.path for v in pipeline.weights] == paths


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


def test_keras_file_goes_on_at_another_k(tmp_path):
    make, x, y, _, _ = CASES["siamese"]
    path = str(tmp_path / "model.keras")
    first = tfgpipe.GPipe(make(), 3, 2)
    first.compile("adam", "mse")
    first.fit(x, y, 4, shuffle=False, verbose=0)
    first.save(path)
    second = tfgpipe.load_model(path, num_partitions=2)
    for model in (first, second):
        model.fit(x, y, 4, shuffle=False, verbose=0)
    assert len(second.cells()) == 2
    for a, b in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(a, b)


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


def test_nested_model_does_more_than_its_layers():
    def make():
        x = keras.Input((5,))
        inner = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5)])
        inner.activity_regularizer = keras.regularizers.L2(0.1)
        call = inner.call
        inner.call = lambda *args, **kwargs: 2 * call(*args, **kwargs)
        return keras.Model(x, keras.layers.Dense(2)(inner(x)))

    x, y = normal(5), normal(2)
    found = trained(make, pipeline(2, 2), x, y)
    assert_close(found, by_itself(make, x, y, {}))


def shared_generator():
    """Two layers that draw from one generator, in Keras's order."""
    x = keras.Input((5,))
    generator = keras.random.SeedGenerator(1)
    first, second = Noise(generator), Noise(generator)
    h = second(keras.layers.Dense(5)(keras.layers.Dense(5)(x)))
    return keras.Model(x, keras.layers.Dense(2)(h + first(x)))


def shared_statistics():
    """Two layers that have one batch norm inside."""
    x = keras.Input((1, 5))
    norm = keras.layers.BatchNormalization()
    first, second = (keras.layers.TimeDistributed(norm) for _ in range(2))
    h = second(keras.layers.Dense(5)(keras.layers.Dense(5)(x)))
    return keras.Model(x, keras.layers.Dense(2)(h + first(x)))


@pytest.mark.parametrize(
    ("make", "shape"), [(shared_generator, (5,)), (shared_statistics, (1, 5))]
)
def test_layers_that_share_state_are_called_in_the_order_of_keras(make, shape):
    x, y = normal(*shape), normal(*shape[:-1], 2)
    found = trained(make, pipeline(2, 1), x, y)
    assert_close(found, by_itself(make, x, y, {}))


@pytest.mark.parametrize(
    "make", [normed_beside, scaled_beside, closure_beside, opened_beside]
)
def test_branches_that_share_state_are_called_in_the_order_of_keras(make):
    x, y = normal(4), normal(5)
    found = trained(make, pipeline(2, 1), x, y)
    assert_close(found, by_itself(make, x, y, {}))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("other", [None, normal(4)[::-1]])
def test_optional_input_may_be_left_out(other):
    """A layer that does something else then was opened for both."""
    x, y = [normal(4), other], normal(2)
    found = trained(optional, pipeline(2, 2), x, y)
    # A model inside casts to float32.
    assert_close(found, by_itself(optional, x, y, {}), 1e-6)


def test_length_of_outputs_is_seen_and_not_believed():
    x, y = [normal(2, 4), normal(5, 4)], normal(5, 2)
    found = trained(wrong_length, pipeline(2, 2), x, y)
    assert_close(found, by_itself(wrong_length, x, y, {}))


def test_class_of_the_model_is_restored(tmp_path):
    path = str(tmp_path / "model.keras")
    tfgpipe.GPipe(Backbone(), 2, 2).save(path)
    found = tfgpipe.load_model(path, custom_objects={"Backbone": Backbone})
    assert type(found.model) is Backbone
