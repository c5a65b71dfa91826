"""What errors and warnings tell to do leads there: to the numbers of Keras."""

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


def documented(page, name):
    """The class of that name in an example of a page."""
    (code,) = (t for *_, t in blocks(page) if f"\nclass {name}(" in f"\n{t}")
    names = {"keras": keras, "kl": kl, "np": np, "tf": tf, "tfgpipe": tfgpipe}
    exec(code.partition("\n\n\n")[0], names)
    return names[name]


# ------------------------------------------------------------- merged graphs
def merged(*sizes, num_edges=2):
    """Graphs of so many nodes as one, and a label for each."""
    rng = np.random.default_rng(sum(sizes))
    starts = np.cumsum([0, *sizes[:-1]])
    edges = [
        start + rng.integers(0, n, (num_edges, 2))
        for n, start in zip(sizes, starts)
    ]
    inputs = {
        "nodes": rng.normal(size=(sum(sizes), 3)),
        "edges": np.concatenate(edges).astype("int32"),
        "ids": np.repeat(np.arange(ROWS), sizes).astype("int32"),
    }
    return inputs, rng.normal(size=(ROWS, 1))


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


def trained(model):
    """Numbers after mini-batches of which no number of rows is known."""
    batches = [merged(3, 2, 4, 2), merged(2, 5, 3, 3)]
    batches += [merged(1, 1, 1, 1, num_edges=0)]  # no edges: the first input
    specs = keras.tree.map_structure(
        lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), batches[0]
    )
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=specs
    ).repeat()
    model.compile(sgd(), "mse", metrics=["mae"])
    told = {"steps_per_epoch": 3, "shuffle": False, "verbose": 0}
    logs = model.fit(data, epochs=2, **told).history
    end = model.evaluate(data, steps=3, verbose=0)
    return logs, weights(model), end, model.predict(data, steps=3, verbose=0)


@pytest.mark.parametrize(("k", "kwargs"), [(2, {}), (3, {"schedule": "1f1b"})])
def test_merged_graphs_train_in_one_micro_batch(k, kwargs):
    expected = trained(model_of_merged())
    model = tfgpipe.GPipe(model_of_merged(), k, 1, **kwargs)
    assert_close(trained(model), expected)


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
}


def with_warnings(layer, shape, *args, **kwargs):
    """A pipeline, trained, and the warning of large layers."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = tfgpipe.GPipe(wide(layer, *shape), *args, **kwargs)
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
    _, (message,) = with_warnings(make(), shape, k, 2)
    assert f"With num_partitions={k}, devices wait for layer 'own'" in message
    plain = wide(make(), *shape)
    trained_on_rows(plain)

    def check(**kwargs):
        model, told_again = with_warnings(
            make(), shape, num_micro_batches=2, **kwargs
        )
        assert not told_again
        assert_close(weights(model), weights(plain))

    if kind == "dense":
        check(num_partitions=k, shards={"own": k})
    (count,) = re.findall(r"pass num_partitions=(\d)", message)
    check(num_partitions=int(count))


@pytest.mark.parametrize("units", [8, 80])
def test_what_takes_no_time_is_not_warned_of(units):
    _, found = with_warnings(kl.Dense(units), (2, 8), 4, 2)
    assert not found


# ------------------------------------------------------ steps and states of own
class OwnStep(keras.Model):
    """As on keras.io, see `journeys/test_diffusion.py`: it has no `call`."""

    def train_step(self, data):
        return {}


def test_model_with_a_step_and_no_call_is_told_to_become_a_subclass():
    cure = r"Override\s+them\s+in\s+a\s+subclass\s+of\s+`tfgpipe\.GPipe`"
    with pytest.raises(ValueError, match=cure):
        tfgpipe.GPipe(OwnStep(), 2)
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
    cure = r"Make\s+the\s+states\s+inputs\s+and\s+outputs\s+of\s+the\s+model"
    with pytest.raises(ValueError, match=cure):
        tfgpipe.GPipe(recurrent(True), k)
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
        trained = [w.numpy() for w in model.trainable_weights]
        found.append((history, trained, model.evaluate(x, y, ROWS, verbose=0)))
    assert_close(found[1], found[0])
