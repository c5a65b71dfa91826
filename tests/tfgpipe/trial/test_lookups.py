"""Lookups: gradients of tables whose indices are given, drawn, or constant."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from keras import ops
from kinds import Plain
from tiny import assert_close, quickly

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")
SIZE = 6
X = np.random.default_rng(0).standard_normal((8, 3))


def momentum():
    return keras.optimizers.SGD(0.3, momentum=0.9)


def trained(model, optimizer=momentum, **compiling):
    model.compile(optimizer(), "mse", **quickly(model, compiling))
    for _ in range(2):
        model.train_on_batch(X, X)
    return [w.numpy() for w in model.trainable_weights]


def pipeline(make, k, m, **arguments):
    keras.utils.set_random_seed(3)
    return tfgpipe.GPipe(make(), k, m, **arguments)


def plain(make):
    keras.utils.set_random_seed(3)
    return Plain(make())


class Lookup(kl.Layer):
    """Adds a sum over rows of a table, which are looked up in some order.

    All rows of the table: so the order changes no number, and what is drawn
    may be compared.
    """

    def build(self, shape):
        self.table = self.add_weight((SIZE, 3), "normal")
        self.make()

    def make(self):
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        found = ops.take(self.table, self.indices(x), axis=0)
        return x + ops.sum(ops.tanh(found), axis=0)

    def compute_output_shape(self, shape):
        return shape


class Drawn(Lookup):
    def indices(self, x):
        return keras.random.shuffle(ops.arange(SIZE), seed=self.seed)


class DrawnInAFunction(Lookup):
    def indices(self, x):
        start = keras.random.randint((), 0, SIZE, seed=self.seed)
        return tf.while_loop(
            lambda i, found: i < SIZE,
            lambda i, found: (i + 1, (found + 1) % SIZE),
            (start, ops.arange(SIZE, dtype="int32")),
        )[1]


class Unseeded(Lookup):
    def indices(self, x):
        return tf.random.shuffle(tf.range(SIZE))


class UnseededInAFunction(Lookup):
    def make(self):
        self.draw = tf.function(lambda: tf.random.shuffle(tf.range(SIZE)))

    def indices(self, x):
        return self.draw()


class Mixed(Lookup):
    """Three drawn, the others given: by the number of the first row."""

    def indices(self, x):
        drawn = keras.random.shuffle(tf.range(3), seed=self.seed)
        first = ops.cast(ops.sign(x[0, 0]) + 1, "int32")
        return ops.concatenate([drawn, (tf.range(3) + first) % 3 + 3])


class Counted(Lookup):
    """A metric runs on from micro-batch to micro-batch."""

    def make(self):
        self.count = keras.metrics.Sum()

    def indices(self, x):
        self.count.update_state(1.0)
        start = ops.cast(self.count.result(), "int32")
        return (ops.arange(SIZE, dtype="int32") + start) % SIZE


WARNS = pytest.mark.filterwarnings(
    "ignore:.*(which has side effects|has a metric, 'sum'|was not tried"
    "|'(mixed|counted).*' looks up)"
)


@WARNS
@pytest.mark.parametrize(
    "layer",
    [Drawn, DrawnInAFunction, Unseeded, UnseededInAFunction, Mixed, Counted],
)
def test_each_micro_batch_has_the_gradients_of_its_own_indices(layer):
    def make():
        return [kl.Dense(3), layer(), kl.Dense(3)]

    expected = trained(plain(make))
    settings = [(2, 4, "1f1b")] + [(1, 2, "gpipe")] * (layer is Drawn)
    for k, m, schedule in settings:
        model = pipeline(make, k, m, schedule=schedule, remat="never")
        assert_close(trained(model), expected)


class Notes(kl.Layer):
    """Notes which half of the table comes first, for another layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.start = self.add_weight(
            (), "zeros", dtype="int32", trainable=False
        )

    def call(self, x):
        self.start.assign(ops.cast(ops.sign(x[0, 0]) + 1, "int32"))
        return x


class Noted(Lookup):
    def __init__(self, notes, **kwargs):
        super().__init__(**kwargs)
        self.notes = notes

    def make(self):
        pass

    def indices(self, x):
        return (tf.range(SIZE) + self.notes.start) % SIZE


@pytest.mark.filterwarnings("ignore:Layer 'notes' assigns:UserWarning")
@pytest.mark.parametrize("k", [1, 2])
def test_indices_from_what_an_earlier_layer_assigned_are_each_micro_batchs(k):
    def make():
        notes = Notes()
        return [notes, Noted(notes), kl.Dense(3)]

    model = pipeline(make, k, 4, layers_per_cell=[1, 2] if k == 2 else None)
    assert_close(trained(model), trained(plain(make)))


class Buffer(Lookup):
    """Its positions are state that nobody assigns, or Python's."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.others = tf.constant([3, 4, 5, 0])

    def make(self):
        self.positions = self.add_weight(
            (3,),
            lambda shape, dtype: ops.arange(3, dtype=dtype),
            dtype="int32",
            trainable=False,
        )

    def indices(self, x):
        return ops.concatenate([self.positions, self.others])


def test_lookups_by_positions_kept_as_state_are_one_slice_each():
    """An optimizer would square the slice of each micro-batch by itself."""

    def make():
        return [kl.Dense(3), Buffer()]

    expected = trained(plain(make), keras.optimizers.Adam)
    found = trained(pipeline(make, 2, 4), keras.optimizers.Adam)
    assert_close(found, expected)


# ------------------------------------------------------------ of other lengths
class Cut(kl.Layer):
    """Cuts a batch to the length of its longest row."""

    def call(self, x):
        lengths = tf.reduce_sum(tf.cast(x > 0, "int32"), axis=1)
        return tf.ensure_shape(x[:, : tf.reduce_max(lengths)], (None, None))

    def compute_output_shape(self, shape):
        return (shape[0], None)


class Positions(kl.Layer):
    """The sum of what tables have for tokens and positions, but for 0."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = kl.Embedding(9, 3), kl.Embedding(5, 3)

    def build(self, shape):
        self.tokens.build(shape)
        self.positions.build(shape)

    def call(self, x):
        positions = self.positions(tf.range(tf.shape(x)[1]))
        found = ops.tanh(self.tokens(x) + positions)
        return ops.sum(found * ops.cast(x > 0, "float64")[..., None], axis=1)

    def compute_output_shape(self, shape):
        return (shape[0], 3)


IDS = np.array([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 0, 0]], "int32")
CUTS = pytest.mark.filterwarnings("ignore:.*mixes the rows")


def trained_on_ids(model, optimizer, **compiling):
    model.compile(optimizer(), "mse", **quickly(model, compiling))
    for _ in range(2):
        model.train_on_batch(IDS, X[:4])
    return [w.numpy() for w in model.trainable_weights]


@CUTS
@pytest.mark.parametrize("k", [1, 3])
def test_positions_follow_from_the_longest_row_of_each_micro_batch(k):
    """One position was broadcast to three, in the second micro-batch."""

    def make():
        return [Cut(), Positions(), kl.Dense(3)]

    model = pipeline(make, k, 2)
    found = trained_on_ids(model, momentum)
    assert_close(found, trained_on_ids(plain(make), momentum))


def test_positions_of_batches_of_any_length_are_one_slice_each():
    def make():
        return [kl.Lambda(lambda t: t), Positions(), kl.Dense(3)]

    def any_length():
        return [keras.Input((None,), dtype="int32"), *make()]

    found = trained_on_ids(pipeline(any_length, 3, 2), keras.optimizers.Adam)
    expected = trained_on_ids(plain(make), keras.optimizers.Adam)
    assert_close(found, expected)


class ByBoth(Lookup):
    """Looks up by its inputs and by constants."""

    def make(self):
        pass

    def call(self, x):
        found = ops.take(self.table, ops.argmax(x, -1), axis=0)
        return x + found + ops.take(self.table, np.array([0]), axis=0)


def test_lookups_by_inputs_and_by_constants_are_told_apart():
    def make():
        return [ByBoth(), kl.Dense(3)]

    found = trained(pipeline(make, 1, 2))
    assert_close(found, trained(plain(make)))


class Unique(kl.Layer):
    """Looks up each id once, and hands it out to all who have it."""

    def __init__(self, take, **kwargs):
        super().__init__(**kwargs)
        self.take = take

    def build(self, shape):
        self.table = self.add_weight((SIZE, 3), "normal")

    def call(self, x):
        ids, places = tf.unique(tf.argmax(x, -1))
        return x + tf.gather(self.take(self.table, ids), places)


@pytest.mark.parametrize("name", ["keras", "tensorflow"])
def test_lookups_of_unique_indices_are_one_slice_for_each_index(name):
    """An optimizer would square the slices of two micro-batches apart."""
    take = {
        "keras": lambda table, ids: ops.take(table, ids, axis=0),
        "tensorflow": lambda table, ids: tf.gather(table.value, ids),
    }[name]

    def make():
        return [kl.Dense(3), Unique(take), kl.Dense(3)]

    expected = trained(plain(make), keras.optimizers.Adam)
    found = trained(pipeline(make, 2, 4), keras.optimizers.Adam)
    assert_close(found, expected)
