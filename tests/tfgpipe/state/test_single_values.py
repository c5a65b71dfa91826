"""A batch normalisation that sees one value warns, once, and else nothing."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe

WARNING = (
    "Layer '{}' normalises single values: a mini-batch of {} rows in {} micro-"
)


def trained(layers, rows, m=4, size=None, **kwargs):
    """A model after a batch of so many rows, or batches of a size."""
    items = [keras.Input((3,)), *layers, kl.Flatten(), kl.Dense(1)]
    model = tfgpipe.GPipe(items, num_micro_batches=m, **kwargs)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((rows, 3), "float32")
    model.fit(x, x[:, :1], batch_size=size or rows, verbose=0)
    return model


def norm(**kwargs):
    return kl.BatchNormalization(name="norm", **kwargs)


def warned(rows, count, name="norm"):
    return pytest.warns(UserWarning, match=WARNING.format(name, rows, count))


@pytest.fixture
def silent():
    """Warnings of single values are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Layer '.*' normalises single")
        yield


def test_weights_before_a_normalisation_of_single_values_are_not_trained():
    before = kl.Dense(3)
    before.build((None, 3))
    start = before.kernel.numpy()
    with warned(4, 4) as found:
        trained([before, norm()], 4, num_partitions=1)
    np.testing.assert_array_equal(before.kernel, start)  # as it says
    assert "Pass a smaller `num_micro_batches`" in str(found[0].message)


@pytest.mark.parametrize(
    ("shape", "rows", "size", "sees"),
    [
        ((3,), 7, None, (7, 4)),  # 1, 2, 2 and 2
        ((3,), 3, None, (3, 3)),  # fewer rows than micro-batches
        ((3,), 13, 8, (5, 4)),  # of a size that only the step knows
        ((1, 1, 3), 4, None, (4, 4)),  # one position of one row
    ],
)
def test_single_values_in_micro_batches_are_warned_of(shape, rows, size, sees):
    with warned(*sees):
        layers = [kl.Reshape(shape), norm()]
        trained(layers, rows, size=size, num_partitions=1)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("rows", "size", "m"),
    [
        (8, None, 4),
        (17, 8, 4),  # the last mini-batch has one row: Keras does the same
        (3, 1, 1),  # so have all of these
    ],
)
def test_two_rows_a_micro_batch_or_one_micro_batch_are_fine(rows, size, m):
    trained([norm()], rows, m, size, num_partitions=1)


@pytest.mark.usefixtures("silent")
def test_one_row_of_several_values_is_fine():
    layers = [
        kl.Reshape((3, 1)),
        kl.BatchNormalization(name="of_positions"),
        kl.Reshape((1, 3, 1)),
        kl.BatchNormalization(name="of_pixels"),
        kl.Reshape((1, 3)),
        kl.BatchNormalization(name="of_channels", axis=1),
        kl.Reshape((3,)),
        kl.BatchNormalization(name="frozen", trainable=False),
        kl.LayerNormalization(),
    ]
    trained(layers, 4, num_partitions=1)


@pytest.mark.usefixtures("silent")
def test_rows_that_a_layer_makes_count():
    class Rows(kl.Layer):
        """Normalises three values a row."""

        def __init__(self):
            super().__init__()
            self.norm = norm()

        def call(self, x):
            return keras.ops.reshape(
                self.norm(keras.ops.reshape(x, (-1, 1))), (-1, 3)
            )

    trained([Rows()], 7, num_partitions=1)


@contextlib.contextmanager
def noted():
    """The first words of all warnings of single values."""
    texts = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "Layer '.*' normalises single")
        yield texts
    texts.extend(str(warning.message)[:12] for warning in found)


def test_each_layer_is_warned_of_once():
    other = kl.BatchNormalization(name="more")
    with noted() as texts:
        model = trained([norm(), other], 11, size=4, num_partitions=2)
        model.fit(np.ones((3, 3)), np.ones((3, 1)), verbose=0)
    assert sorted(texts) == ["Layer 'more'", "Layer 'norm'"]


def test_eager_step_warns():
    model = tfgpipe.GPipe([norm(), kl.Dense(1)], 2, 4)
    model.compile("sgd", "mse", run_eagerly=True)
    with warned(4, 4):
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))


@pytest.mark.usefixtures("silent")
def test_evaluation_and_prediction_are_fine():
    model = tfgpipe.GPipe([norm(), kl.Dense(1)], 2, 4)
    model.compile("sgd", "mse")
    model.evaluate(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    model.predict(np.ones((4, 3)), verbose=0)


@pytest.mark.parametrize(
    ("synchronized", "is_known"), [(True, True), (False, False)]
)
def test_rows_of_all_replicas_count_where_moments_are_theirs(
    synchronized, is_known
):
    items = [norm(synchronized=synchronized), kl.Dense(1)]
    with tfgpipe.PipelineStrategy(2, 1).scope():
        model = tfgpipe.GPipe(items, num_micro_batches=2)
        model.compile("sgd", "mse")
    batches = tf.data.Dataset.from_tensors((np.ones((4, 3)), np.ones((4, 1))))
    if not is_known:
        batches = batches.unbatch().batch(4)
    with noted() as texts:
        model.fit(batches, verbose=0)
    assert texts == ([] if synchronized else ["Layer 'norm'"])
