"""Heads in parts: the numbers are those of whole ones, and Keras's."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from device_names import names
from graphs import called, operations, step_graph, tasks
from keras import layers as kl

import tfgpipe
from tfgpipe.internals import function_graph

WORDS, LENGTH = 30, 6
LOSS = keras.losses.SparseCategoricalCrossentropy


def words(*last):
    """A language model whose padding is masked."""
    return [
        kl.Embedding(WORDS, 8, mask_zero=True),
        kl.Dense(8, "tanh"),
        kl.LayerNormalization(),
        *(last or [kl.Dense(WORDS)]),
    ]


def tokens(rows=11):
    x = np.random.default_rng(0).integers(0, WORDS, (rows, LENGTH), "int32")
    return x, np.roll(x, -1, 1)


def one_hot(rows=11):
    x, y = tokens(rows)
    return x, np.eye(WORDS)[y]


def smoothed():
    return keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.2
    )


WAYS = {
    "masked": (words, tokens, lambda: {"loss": LOSS(from_logits=True)}),
    "summed": (
        words,
        tokens,
        lambda: {"loss": LOSS(from_logits=True, reduction="sum")},
    ),
    "ignored word": (
        words,
        tokens,
        lambda: {"loss": LOSS(from_logits=True, ignore_class=3)},
    ),
    "softmax": (
        lambda: words(kl.Dense(WORDS), kl.Activation("softmax")),
        tokens,
        lambda: {"loss": LOSS()},
    ),
    "smoothed": (words, one_hot, lambda: {"loss": smoothed()}),
    "metrics": (
        words,
        tokens,
        lambda: {
            "loss": LOSS(from_logits=True),
            "metrics": ["accuracy"],
            "weighted_metrics": ["sparse_categorical_crossentropy"],
        },
    ),
    "a metric of the outputs": (
        words,
        one_hot,
        lambda: {
            "loss": smoothed(),
            "metrics": [lambda y, y_pred: keras.ops.max(y_pred, -1)],
        },
    ),
}


def compiled(make, model, arguments, **kwargs):
    keras.utils.set_random_seed(5)
    model = model(make(), **kwargs)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **arguments)
    return model


def pipeline(make=words, way="masked", parts=3, k=2, m=2, **kwargs):
    return compiled(
        make,
        tfgpipe.GPipe,
        WAYS[way][2](),
        num_partitions=k,
        num_micro_batches=m,
        head_parts=parts,
        **kwargs,
    )


def results(model, data, **kwargs):
    """All that a user sees of two epochs, and of what follows."""
    x, y = data
    options = {"batch_size": 7, "verbose": 0, **kwargs}
    history = model.fit(x, y, epochs=2, shuffle=False, **options)
    evaluated = model.evaluate(x, y, return_dict=True, **options)
    outputs = model.predict(x, batch_size=7, verbose=0)
    return history.history, evaluated, model.get_weights(), outputs


def assert_close(found, expected):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12),
        found,
        expected,
    )


def ways():
    """All, with weights and without; a few of them quickly."""
    quick = [("masked", True), ("metrics", True), ("softmax", False)]
    for point in itertools.product(WAYS, (False, True)):
        marks = [] if point in quick else pytest.mark.slow
        yield pytest.param(*point, marks=marks)


@pytest.mark.parametrize(("way", "is_weighted"), [*ways()])
@pytest.mark.usefixtures("float64")
def test_numbers_are_those_of_keras(way, is_weighted):
    """With 4 and 3 rows, then 2 and 2, of which 3 parts are made."""
    make, data, arguments = WAYS[way]
    weights = {}
    if is_weighted:
        rng = np.random.default_rng(1)
        weights = {"sample_weight": rng.random((11, LENGTH))}
    plain = compiled(make, keras.Sequential, arguments())
    expected = results(plain, data(), **weights)
    found = results(pipeline(make, way), data(), **weights)
    assert_close(found, expected)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
@pytest.mark.usefixtures("float64")
def test_mini_batches_of_any_number_of_rows(schedule):
    """Of one row there are no two micro-batches, nor parts."""
    x, y = tokens(12)
    ends = [0, 5, 6, 12]

    def batches():
        for a, b in itertools.pairwise(ends):
            yield x[a:b], y[a:b]

    signature = tf.TensorSpec((None, LENGTH), "int32")
    found = []
    for model in (
        compiled(words, keras.Sequential, WAYS["masked"][2]()),
        pipeline(m=4, schedule=schedule),
    ):
        dataset = tf.data.Dataset.from_generator(
            batches, output_signature=(signature, signature)
        ).repeat()
        history = model.fit(
            dataset, epochs=2, steps_per_epoch=3, shuffle=False, verbose=0
        )
        found.append([history.history["loss"], model.get_weights()])
    assert_close(*found)


class Positions(kl.Layer):
    """Makes numbers of positions, which are the same for all rows."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, shape[-1]), name="table")

    def call(self, x):
        return keras.ops.tanh(self.table[: keras.ops.shape(x)[1]])


class Head(kl.Layer):
    """Adds them, and turns the sum into words."""

    def build(self, x_shape, positions_shape):
        self.kernel = self.add_weight(shape=(x_shape[-1], WORDS), name="kernel")

    def call(self, x, positions):
        return keras.ops.matmul(x + positions[None], self.kernel)


@pytest.mark.parametrize("length", [LENGTH, None])
@pytest.mark.usefixtures("float64")
def test_what_comes_to_the_head_may_have_no_rows(length):
    """As many positions as a micro-batch has rows; its gradient adds up."""

    def model():
        keras.utils.set_random_seed(5)
        x = keras.Input((length,), dtype="int32")
        h = kl.Embedding(WORDS, 4)(x)
        return keras.Model(x, Head(name="head")(h, Positions()(h)))

    found = []
    signature = tf.TensorSpec((None, length), "int32")
    for wrap in (
        lambda model: model,
        lambda model: tfgpipe.GPipe(model, 2, 2, head_parts=3),
    ):
        made = wrap(model())
        made.compile(keras.optimizers.SGD(0.5), LOSS(from_logits=True))
        dataset = tf.data.Dataset.from_generator(
            lambda: [tokens(2 * LENGTH)],
            output_signature=(signature, signature),
        ).repeat()
        history = made.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0)
        found.append([history.history["loss"], made.get_weights()])
    assert_close(*found)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"k": 1}, marks=pytest.mark.slow),
        {"k": 4},  # the last cell is the head alone
        {"remat_groups": 2, "layers_per_cell": [2, 2]},
        pytest.param({"remat": 0.5}, marks=pytest.mark.slow),
        {"weights_on": "host", "devices": names(3)[1:]},
        {"m": 3, "schedule": "F0 F1 F2 B2 B1 B0\nF0 F1 B0 F2 B1 B2"},
    ],
)
@pytest.mark.usefixtures("float64")
def test_beside_other_arguments(arguments):
    expected = results(pipeline(parts=1, **arguments), tokens())
    assert_close(results(pipeline(**arguments), tokens()), expected)


def test_logits_of_a_part_are_there_alone():
    """Nothing but the head's calls makes any; each waits for the one before."""
    heads = [
        op
        for op in tasks(step_graph(pipeline(), *tokens(12)))
        if "SparseSoftmaxCrossEntropyWithLogits"
        in {own.type for own in operations(function_graph(op, called(op)))}
    ]
    assert len(heads) == 2 * 3  # micro-batches of 6 rows, 3 parts
    for before, op in itertools.pairwise(heads):
        assert before in {*op.control_inputs, *(t.op for t in op.inputs)}
    shapes = [t.shape.as_list() for op in heads for t in op.outputs]
    assert [None, LENGTH, 8] in shapes  # the gradient of what came in
    assert [None, LENGTH, WORDS] not in shapes


@pytest.mark.parametrize(
    ("last", "who"),
    [
        (lambda: kl.Dropout(0.5), "dropout"),
        (kl.BatchNormalization, "batch_normalization"),
        (lambda: kl.Dense(WORDS, activity_regularizer="l2"), "dense"),
    ],
)
def test_what_parts_do_not_add_up_to_is_refused(last, who):
    def make():
        return words(kl.Dense(WORDS, name="wide"), last())

    with pytest.raises(ValueError, match=f"`head_parts` must be 1.*'{who}"):
        pipeline(make).fit(*tokens(), verbose=0)


def test_a_loss_of_the_mini_batch_is_refused():
    model = pipeline()
    model.compile("sgd", lambda y, y_pred: keras.ops.mean(y_pred))
    with pytest.raises(ValueError, match="does not add up"):
        model.fit(*tokens(), verbose=0)
