"""Features of pipelines: where things are, what crosses devices, and when.

That the numbers stay is in `test_transparency.py`, by the table of features.
"""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from crossing import sent_tensors
from device_names import names
from graphs import called, is_task, operations, step_graph, tasks
from keras import layers as kl
from quick import quick

import tfgpipe
from tfgpipe.devices.names import same_device
from tfgpipe.internals import function_graph
from tfgpipe.schedules import CHUNKS, SCHEDULES, Schedule

HOST = "CPU:0"
WORDS, LENGTH = 30, 6
LOSS = keras.losses.SparseCategoricalCrossentropy


def chain(k=2, m=4, **kwargs):
    """Dense layers on two devices, of which none is the host."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,))]
    layers += [kl.Dense(8, "tanh", name=f"d{i}") for i in range(6)]
    layers += [kl.BatchNormalization()]
    model = tfgpipe.GPipe(layers, k, m, devices=names(3)[1:], **kwargs)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse")
    return model


def data(rows=12):
    x = np.random.default_rng(0).standard_normal((rows, 8)).astype("float32")
    return x, x[:, ::-1].copy()


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


def of_words(wrap=tfgpipe.GPipe, last=(), **kwargs):
    """A language model, trained by momentum."""
    keras.utils.set_random_seed(5)
    model = wrap(words(*last), **kwargs)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, LOSS(from_logits=True))
    return model


def in_parts(k=2, m=2, parts=3, **kwargs):
    split = {"num_partitions": k, "num_micro_batches": m, "head_parts": parts}
    return of_words(**split, **kwargs)


def assert_close(found, expected, limit=1e-10):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, limit, limit / 100)


# ------------------------------------------------------------------- offloading
def test_what_is_kept_goes_to_the_host_and_comes_back():
    """Of 4 micro-batches the first two are away, in each cell."""
    copied = {}
    for remat in ("never", "offload"):
        graph = step_graph(chain(remat=remat), *data())
        calls = [op for op in graph.get_operations() if is_task(op)]
        made = {t.ref() for op in calls for t in op.outputs}
        copied[remat] = {
            op.inputs[0].op.name
            for op in graph.get_operations()
            if op.type == "Identity"
            and op.inputs[0].ref() in made
            and same_device(op.device, HOST)
        }
    assert len(copied["offload"] - copied["never"]) == 2 * 2


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_less_is_held_in_the_same_time(name):
    """Where a transfer takes half the time of a forward pass."""
    schedule = SCHEDULES[name](4, 8, CHUNKS[name] or 2)
    kept, sent = schedule.program("never"), schedule.program("offload")
    assert sent.length() == kept.length()
    assert sent.held()[0] < kept.held()[0]
    assert all(a <= b for a, b in zip(sent.held(), kept.held(), strict=True))
    assert sent.is_forward_first == kept.is_forward_first


def test_program_says_what_is_away():
    text = str(SCHEDULES["gpipe"](2, 4).program("offload")).splitlines()
    assert text[:3] == [
        "device 0  F0+ F1+ F2+ F3+             B3----- B2----- B1----- B0-----",
        "  to host     O0  O1",
        "  from host                                   T1      T0",
    ]
    # A device that would hold no less sends nothing.
    program = Schedule("F0 F1 B0 B1\nF0 B0 F1 B1").program("offload")
    assert {op.kind for op in program.ops} == {"forward", "backward"}


# ---------------------------------------------------------- weights on the host
@pytest.mark.parametrize("where", ["host", names(3)[2]])
def test_weights_and_slots_are_on_the_host_or_any_device(where):
    model = chain(6, schedule="breadth_first", weights_on=where)
    model.fit(*data(), verbose=0)
    slots = [v for v in model.optimizer.variables if len(v.shape)]
    assert len(slots) == 2 * len(model.trainable_variables)
    device = HOST if where == "host" else where
    for variable in (*model.trainable_variables, *slots):
        assert same_device(variable.value.device, device)
    for variable in model.non_trainable_variables:
        assert not same_device(variable.value.device, HOST)


@pytest.mark.slow
def test_frozen_weights_are_on_the_host_and_may_be_trained_again():
    found = []
    for weights_on in ("devices", "host"):
        keras.utils.set_random_seed(3)
        layers = [kl.Dense(8, "tanh", name=f"d{i}") for i in range(4)]
        spectral = kl.SpectralNormalization(kl.Dense(8), name="spectral")
        layers += [spectral, kl.BatchNormalization(name="norm")]
        plain = keras.Sequential([keras.Input((8,)), *layers])
        for layer in layers[:3]:
            layer.enable_lora(2)
        for layer in layers[3:]:
            layer.trainable = False
        split = {"devices": names(3)[1:], "schedule": "breadth_first"}
        model = tfgpipe.GPipe(plain, 4, 3, weights_on=weights_on, **split)
        for trained in (False, True):
            layers[3].trainable = trained
            model.compile(keras.optimizers.Adam(0.01), "mse")
            model.fit(*data(), 6, 2, shuffle=False, verbose=0)
        found.append([*model.get_weights(), model.predict(data(7)[0])])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    for v in (v for layer in layers for v in layer.weights):
        is_state = "vector_u" in v.path or "moving" in v.path
        assert same_device(v.value.device, HOST) != is_state


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        # The last two cells of a device stay there from pass to pass.
        ("breadth_first", {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}),
        ("gpipe", {0: 1, 5: 1}),
    ],
)
def test_weights_are_sent_when_a_device_comes_to_their_cell(schedule, most):
    k = 6 if schedule == "breadth_first" else 2
    model = chain(k, schedule=schedule, weights_on="host")
    graph = step_graph(model, *data())
    paths = {id(v.value.handle): v.path for v in model.trainable_variables}
    storages = {
        id(inner): "/".join(paths[id(outer)].split("/")[-2:])
        for outer, inner in graph.captures
        if id(outer) in paths
    }
    reads = collections.defaultdict(list)
    for op in graph.get_operations():
        if op.type == "ReadVariableOp":
            reads[storages.get(id(op.inputs[0]))].append(op)
    for i, count in most.items():
        assert len(reads[f"d{i}/kernel"]) == count
    waiting = [
        op
        for op in reads["d0/kernel"]
        if any("Call" in before.type for before in op.control_inputs)
    ]
    assert len(waiting) == most[0] - 1  # for the task before the last one


@pytest.mark.parametrize("m", [1, 2])
def test_rows_of_a_table_on_the_host_cross_and_its_gradient_is_sparse(m):
    """Where the layers beside the table are small."""
    count, rows = 500, 8
    layers = [keras.Input((LENGTH,), dtype="int32"), kl.Embedding(count, 4)]
    layers += [kl.Flatten(), kl.Dense(8, "tanh"), kl.Dense(2)]
    cut = {"devices": names(3), "layers_per_cell": [1, 2, 1]}
    model, applied = tfgpipe.GPipe(layers, 3, m, **cut), []
    model.compile(keras.optimizers.Adam(0.01), "mse")
    apply = model.optimizer.apply_gradients

    def noting(pairs):
        applied.extend(pairs)
        apply(pairs)

    model.optimizer.apply_gradients = noting
    x = np.random.default_rng(0).integers(0, count, (rows, LENGTH), "int32")
    sent = sent_tensors(model, x, np.ones((rows, 2), "float32"))
    slices, table = applied[0]
    assert isinstance(slices, tf.IndexedSlices)
    assert slices.values.shape == (rows * LENGTH, 4)
    slots = [v for v in model.optimizer.variables if v.shape == table.shape]
    assert len(slots) == 2
    for variable in (table, *slots):
        assert same_device(variable.value.device, HOST)
    # Forward the rows that are looked up, and back their gradients.
    crossing = [
        shape
        for source, target, shape, _ in sent
        if HOST in (source, target) and np.prod(shape) > 2 * rows
    ]
    assert crossing == [(rows // m, LENGTH, 4)] * 2 * m


# --------------------------------------------------------------- heads in parts
@pytest.mark.usefixtures("float64")
def test_mini_batches_of_any_number_of_rows():
    """Of one row there are no two micro-batches, nor parts."""
    x, y = tokens(12)

    def batches():
        for a, b in itertools.pairwise([0, 5, 6, 12]):
            yield x[a:b], y[a:b]

    signature = tf.TensorSpec((None, LENGTH), "int32")
    found = []
    for model in (
        of_words(keras.Sequential),
        in_parts(m=4, schedule="zero_bubble"),
    ):
        dataset = tf.data.Dataset.from_generator(
            batches, output_signature=(signature, signature)
        ).repeat()
        history = model.fit(
            dataset, epochs=2, steps_per_epoch=3, shuffle=False, verbose=0
        )
        found.append([history.history["loss"], *model.get_weights()])
    assert_close(*found)


BESIDE = [
    {"k": 4},  # the last cell is the head alone
    {"k": 1},
    {"remat_groups": 2, "layers_per_cell": [2, 2]},
    {"remat": 0.5},
    {"weights_on": "host", "devices": names(3)[1:]},
    {"m": 3, "schedule": "F0 F1 F2 B2 B1 B0\nF0 F1 B0 F2 B1 B2"},
]


@pytest.mark.parametrize("arguments", quick(BESIDE, BESIDE[:1]))
@pytest.mark.usefixtures("float64")
def test_heads_in_parts_beside_other_arguments(arguments):
    found = []
    for parts in (1, 3):
        model = in_parts(parts=parts, **arguments)
        model.fit(*tokens(), batch_size=7, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert_close(*found)


def test_logits_of_a_part_are_there_alone():
    """Nothing but the head's calls makes any; each waits for the one before."""
    heads = [
        op
        for op in tasks(step_graph(in_parts(), *tokens(12)))
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
    ("last", "loss", "words"),
    [
        (lambda: kl.Dropout(0.5), "mse", "must be 1.*'dropout"),
        (kl.BatchNormalization, "mse", "must be 1.*'batch_normalization"),
        (
            lambda: kl.Dense(WORDS, activity_regularizer="l2"),
            "mse",
            "must be 1.*'dense",
        ),
        (
            lambda: kl.Dense(WORDS),
            lambda y, y_pred: keras.ops.mean(y_pred),
            "does not add up",
        ),
    ],
)
def test_what_parts_do_not_add_up_to_is_refused(last, loss, words):
    model = in_parts(last=[kl.Dense(WORDS, name="wide"), last()])
    if loss != "mse":
        model.compile("sgd", loss)
    with pytest.raises(ValueError, match=words):
        model.fit(*tokens(), verbose=0)


# ----------------------------------------------------------------------- shards
def sharded(shards, layers=None, k=2, m=2, **kwargs):
    layers = layers or [keras.Input((4,)), kl.Dense(6, "tanh", name="wide")]
    kwargs.setdefault("devices", names(8)[1:3])
    model = tfgpipe.GPipe(layers, k, m, shards=shards, **kwargs)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def rows(width):
    return np.random.default_rng(0).standard_normal((9, width))


def fitted(model):
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(rows(4), rows(4), 6, 2, shuffle=False, verbose=0)
    outputs = model.predict(rows(4), verbose=0)
    return [outputs, *(w.numpy() for w in model.weights)]


def test_devices_get_their_columns_alone():
    """What each device takes of the weights and of their gradients."""
    heads = kl.EinsumDense("abc,cde->abde", (None, 3, 4), name="heads")
    own = {name[-5:] for name in names(8)[5:8]}
    layers = [keras.Input((5, 6)), heads, kl.Flatten(), kl.Dense(2)]
    model = sharded({"heads": names(8)[5:8]}, layers)
    x, y = np.ones((6, 5, 6), "float32"), np.ones((6, 2), "float32")
    seen = collections.defaultdict(set)
    for op in step_graph(model, x, y).get_operations():
        for tensor in op.outputs:
            shape = tensor.shape.as_list() if tensor.shape.rank else []
            if len(shape) == 3 and (shape[0], shape[2]) == (6, 4):
                seen[op.device[-5:]].add(shape[1])
    assert {name: seen[name] for name in own} == {name: {1} for name in own}
    assert not {name[-5:] for name in names(8)[1:3]} & {*seen}


def test_program_has_shards_beside_each_other():
    layers = [keras.Input((4,)), kl.Dense(4), kl.Dense(6, name="last")]
    model = sharded({"last": names(8)[5:]}, layers, remat="never")
    model.fit(np.ones((6, 4)), np.ones((6, 6)), 6, verbose=0)
    program = model.program(6)
    assert program.num_devices == 5
    times = dict(zip(program.ops, program.simulate(lambda op: 1.0)))
    own = [op for op in program.ops if op.device > 1 and op.micro_batch == 0]
    assert len(own) == 6
    assert len({times[op] for op in own if op.kind == "forward"}) == 1
    assert str(program).count("shards") == 3


def test_activations_of_shards_go_to_the_host_and_come_back():
    """After what follows on their cell's device, as those of others."""
    layers = [keras.Input((4,)), kl.Dense(6, "tanh", name="wide"), kl.Dense(4)]
    where = {"k": 1, "m": 6, "devices": names(1), "remat": "offload"}
    model = sharded({"wide": names(8)[4:6]}, layers, **where)
    model.fit(np.ones((12, 4)), np.ones((12, 4)), verbose=0)
    program = model.program(12)
    assert max(program.held()[1:]) < 6
    times = dict(zip(program.ops, program.simulate(lambda op: 1.0)))
    fetched = [op for op in program.ops if op.kind == "fetch" and op.device]
    assert fetched
    for op in fetched:
        assert times[op][0] > times[op._replace(kind="offload")][1]


class Scaled(kl.Dense):
    """Makes something of its weights."""

    @property
    def kernel(self):
        return super().kernel * 2.0


class ColumnWise(Scaled):
    is_column_wise = True


class Renamed(kl.Dense):
    """Computes as Keras does."""

    def get_config(self):
        return {**super().get_config(), "more": 1}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", [Renamed, ColumnWise])
def test_subclasses_that_compute_columns_have_shards(kind):
    def layers():
        keras.utils.set_random_seed(1)
        return [keras.Input((4,)), kind(6, "tanh", name="wide"), kl.Dense(4)]

    found = fitted(sharded({"wide": 2}, layers()))
    assert_close(found, fitted(keras.Sequential(layers())))


class Block(kl.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wide = kl.Dense(8, "gelu", name="wide")
        self.narrow = kl.Dense(4, name="narrow")

    def call(self, x):
        return x + self.narrow(self.wide(x))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("shards", "count"), [({"wide": 2}, 3), ({"block_1/wide": 2}, 1)]
)
def test_names_may_say_what_is_around_a_layer(shards, count):
    def blocks():
        keras.utils.set_random_seed(1)
        inner = [Block(name=f"block_{i}") for i in range(3)]
        return keras.Sequential([keras.Input((4,)), *inner])

    model = sharded(shards, blocks())
    assert_close(fitted(model), fitted(blocks()))
    on_host = [v for v in model.weights if "CPU:0" in v.value.device]
    assert len(on_host) == 2 * count


def attending(heads=3, dropout=0.0):
    x = keras.Input((LENGTH, 6))
    own = kl.MultiHeadAttention(heads, 4, name="own", dropout=dropout)
    return keras.Model(x, own(x, x))


def norm():
    return kl.LayerNormalization(name="norm")


def replaced():
    layer = kl.Dense(4, name="replaced")
    layer.call = lambda x, training: keras.ops.softmax(x)
    return layer


# Shards, layers other than the usual ones, and what is said.
WRONG = {
    "no such layer": ({"word": 2}, None, "must name layers that the model"),
    "no columns": ({"norm": 2}, None, "must name layers that the model"),
    "too few columns": ({"dense": names(8)[:4]}, None, "with as many columns"),
    "too many": ({"dense": 3}, None, "from 2 to the 2 of a replica"),
    "twice the same": ({"dense": names(1) * 2}, None, "each once"),
    "unknown": ({"dense": [*names(1), "GPU:99"]}, None, "TensorFlow lists"),
    "other weights": (
        {"dense": 2},
        lambda: [keras.Input((4,)), Scaled(4, name="dense"), norm()],
        "is_column_wise",
    ),
    "one head": (
        {"own": names(8)[4:6]},
        lambda: attending(1),
        "without dropout",
    ),
    "dropout": (
        {"own": names(8)[4:6]},
        lambda: attending(3, 0.1),
        "without dropout",
    ),
    "another call": (
        {"replaced": 2},
        lambda: [keras.Input((4,)), replaced(), kl.Dense(4)],
        "is_column_wise",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_shards_are_refused(wrong):
    shards, make, message = WRONG[wrong]
    around = keras.Sequential([kl.Dense(3, name="dense")], name="around")
    layers = make() if make else [keras.Input((4,)), norm(), around]
    k = 1 if isinstance(layers, keras.Model) else 2
    with pytest.raises(ValueError, match=message):
        sharded(shards, layers, k, devices=names(k))


def test_heads_in_parts_have_no_shards():
    with pytest.raises(ValueError, match="`head_parts` must be 1"):
        sharded({"wide": names(8)[4:6]}, k=1, devices=names(1), head_parts=2)


def test_masks_of_single_heads_are_refused():
    x, mask = keras.Input((LENGTH, 6)), keras.Input((3, LENGTH, LENGTH))
    own = kl.MultiHeadAttention(3, 4, name="own")
    model = keras.Model([x, mask], own(x, x, attention_mask=mask))
    model = sharded({"own": names(8)[4:6]}, model, k=1, devices=names(1))
    given = [np.ones((4, LENGTH, 6)), np.ones((4, 3, LENGTH, LENGTH))]
    with pytest.raises(ValueError, match="the same for all heads"):
        model.fit(given, given[0], verbose=0)
