"""What errors and warnings tell to do leads there: to the numbers of Keras."""

import ast
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from keras import ops
from test_docs import blocks
from tiny import assert_close, weights

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")
ROWS = 4


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def told(error, make, *args, **kwargs):
    with pytest.raises(error) as found:
        make(*args, **kwargs)
    return re.sub(r"\s+", " ", str(found.value))


def documented(page, name):
    """The class of that name in an example of a page."""
    (code,) = (t for *_, t in blocks(page) if f"\nclass {name}(" in f"\n{t}")
    names = {"keras": keras, "kl": kl, "np": np, "tf": tf, "tfgpipe": tfgpipe}
    exec(code.partition("\n\n\n")[0], names)
    return names[name]


# ------------------------------------------------------------- merged graphs
# Nodes of each graph of a mini-batch.
SIZES = [(3, 2, 4, 2), (2, 5, 3, 3), (4, 1, 1, 2)]


def graphs(seed=0):
    """Mini-batches of graphs, each as nodes and edges, and their labels."""
    rng = np.random.default_rng(seed)
    return [
        (
            [
                (rng.normal(size=(n, 3)), rng.integers(0, n, (n + 2, 2)))
                for n in sizes
            ],
            rng.normal(size=(ROWS, 1)),
        )
        for sizes in SIZES
    ]


def merged(batch):
    counts = [len(nodes) for nodes, _ in batch]
    starts = np.cumsum([0, *counts[:-1]])
    edges = [e + start for (_, e), start in zip(batch, starts)]
    return {
        "nodes": np.concatenate([nodes for nodes, _ in batch]),
        "edges": np.concatenate(edges).astype("int32"),
        "ids": np.repeat(np.arange(ROWS), counts).astype("int32"),
    }


class Sent(kl.Layer):
    """What a node has, and what comes to it along the edges."""

    def call(self, inputs):
        nodes, edges = inputs
        sent = ops.take(nodes, edges[:, 0], axis=0)
        there = tf.math.unsorted_segment_sum(
            sent, edges[:, 1], tf.shape(nodes)[0]
        )
        return ops.concatenate([nodes, there], -1)


class MeanOfGraphs(kl.Layer):
    def call(self, inputs):
        return tf.math.segment_mean(*inputs)


def model_of_merged():
    keras.utils.set_random_seed(1)
    nodes, ids = keras.Input((3,), name="nodes"), keras.Input((), name="ids")
    edges = keras.Input((2,), dtype="int32", name="edges")
    h = kl.Dense(8, "tanh")(Sent()([nodes, edges]))
    h = kl.BatchNormalization()(kl.Dropout(0.2, seed=3)(h))
    h = kl.Dense(8, "tanh")(Sent()([h, edges]))
    means = MeanOfGraphs()([h, ops.cast(ids, "int32")])
    inputs = {"nodes": nodes, "edges": edges, "ids": ids}
    return keras.Model(inputs, kl.Dense(1)(means))


def in_turn(batches):
    """As a dataset, in which no number of rows is known."""

    def spec(array):
        return tf.TensorSpec((None, *array.shape[1:]), array.dtype)

    specs = keras.tree.map_structure(spec, batches[0])
    return tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=specs
    )


def trained(model, batches, loss="mse"):
    model.compile(sgd(), loss, metrics=["mae"])
    data, n = in_turn(batches).repeat(), len(batches)
    quietly = {"shuffle": False, "verbose": 0}
    logs = model.fit(data, steps_per_epoch=n, epochs=2, **quietly).history
    end = model.evaluate(data, steps=n, verbose=0)
    outputs = model.predict(data, steps=n, verbose=0)
    return logs, weights(model), end, outputs


def batches_of_merged():
    batches = [(merged(x), y) for x, y in graphs()]
    alone = merged([(normal(1, 3), np.zeros((0, 2)))] * ROWS)
    return [*batches, (alone, normal(ROWS, 1))]  # no edges: the first input


@pytest.mark.parametrize(
    ("k", "kwargs"), [(1, {}), (2, {}), (3, {"schedule": "1f1b"})]
)
def test_merged_graphs_train_in_one_micro_batch(k, kwargs):
    batches = batches_of_merged()
    expected = trained(model_of_merged(), batches)
    model = tfgpipe.GPipe(model_of_merged(), k, 1, **kwargs)
    assert_close(trained(model, batches), expected)


# ------------------------------------------------- layers that devices wait for
def wide(layer, *shape):
    """A model in which a layer has most of the cost."""
    keras.utils.set_random_seed(1)
    x = keras.Input(shape)
    h = keras.layers.GlobalAveragePooling1D()(
        kl.Reshape((-1, 8))(layer(kl.Dense(8, "tanh")(x)))
    )
    return keras.Model(x, kl.Dense(2)(kl.Dense(8, "tanh")(h)))


LARGE = {
    "dense": (lambda: kl.Dense(1600, name="own"), (64, 8), 3),
    "gru": (lambda: kl.GRU(64, return_sequences=True, name="own"), (64, 8), 2),
    "conv1d": (lambda: kl.Conv1D(64, 5, name="own"), (250, 8), 4),
    "conv3d": (lambda: kl.Conv3D(16, 3, name="own"), (9, 8, 8, 8), 3),
}


def with_warnings(make):
    """What `make` returns, trained, and the warning of large layers."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = make()
        trained_on_rows(model)
    texts = [str(one.message) for one in found]
    return model, [text for text in texts if "devices wait for" in text]


def trained_on_rows(model):
    model.compile(sgd(), "mse")
    x = normal(8, *model.inputs[0].shape[1:])
    for _ in range(2):
        model.train_on_batch(x, normal(8, 2, seed=1))


@pytest.mark.parametrize("kind", LARGE)
def test_large_layer_is_warned_of_with_a_cure(kind):
    make, shape, k = LARGE[kind]
    _, (message,) = with_warnings(
        lambda: tfgpipe.GPipe(wide(make(), *shape), k, 2)
    )
    assert f"With num_partitions={k}, devices wait for layer 'own'" in message
    assert ("pass shards={" in message) == (kind == "dense")
    plain = wide(make(), *shape)
    trained_on_rows(plain)

    def check(**kwargs):
        model, told_again = with_warnings(
            lambda: tfgpipe.GPipe(
                wide(make(), *shape), num_micro_batches=2, **kwargs
            )
        )
        assert not told_again
        assert_close(weights(model), weights(plain))

    if kind == "dense":
        text = message.partition("shards=")[2].removesuffix(".")
        check(num_partitions=k, shards=ast.literal_eval(text))
        return
    (count,) = re.findall(r"pass num_partitions=(\d)", message)
    check(num_partitions=int(count))
    (text,) = re.findall(r"`tfgpipe.PipelineStrategy\((.*)\)`", message)
    with tfgpipe.PipelineStrategy(*ast.literal_eval(text)).scope():
        check()


@pytest.mark.parametrize("units", [8, 80])
def test_what_takes_no_time_is_not_warned_of(units):
    _, found = with_warnings(
        lambda: tfgpipe.GPipe(wide(kl.Dense(units), 2, 8), 4, 2)
    )
    assert not found


# ------------------------------------------------------ steps and states of own
class OwnStep(keras.Model):
    """As on keras.io, see `journeys/test_diffusion.py`: it has no `call`."""

    def train_step(self, data):
        return {}


def test_model_with_a_step_and_no_call_is_told_to_become_a_subclass():
    text = told(ValueError, tfgpipe.GPipe, OwnStep(), 2)
    assert "Override them in a subclass of `tfgpipe.GPipe`" in text
    assert documented("docs/training.md", "Denoiser").__base__ is tfgpipe.GPipe


def recurrent(is_stateful):
    keras.utils.set_random_seed(1)
    x = keras.Input((5, 3), batch_size=ROWS if is_stateful else None)
    if is_stateful:
        layers = [kl.GRU(6, return_sequences=True, stateful=True)]
        layers += [kl.LSTM(5, return_sequences=True, stateful=True)]
        return keras.Model(x, kl.Dense(2)(layers[1](layers[0](x))))
    starts = [keras.Input((units,)) for units in (6, 5, 5)]
    options = {"return_sequences": True, "return_state": True}
    h, end = kl.GRU(6, **options)(x, initial_state=starts[0])
    h, *ends = kl.LSTM(5, **options)(h, initial_state=starts[1:])
    return keras.Model([x, *starts], [kl.Dense(2)(h), end, *ends])


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 2)])
def test_stateful_layers_become_inputs_and_outputs(k, m):
    text = told(ValueError, tfgpipe.GPipe, recurrent(True), k)
    assert "Make the states inputs and outputs of the model" in text
    stateful = documented("docs/your_model.md", "Stateful")
    x, y, found = normal(3 * ROWS, 5, 3), normal(3 * ROWS, 5, 2), []
    shapes = [(ROWS, units) for units in (6, 5, 5)]
    for model in (
        recurrent(True),
        stateful(
            recurrent(False), shapes, num_partitions=k, num_micro_batches=m
        ),
    ):
        model.compile(sgd(), "mse")
        history = model.fit(x, y, ROWS, 2, shuffle=False, verbose=0).history
        found.append(
            (
                history,
                [w.numpy() for w in model.trainable_weights],
                model.evaluate(x, y, ROWS, verbose=0),
            )
        )
    assert_close(found[1], found[0])
