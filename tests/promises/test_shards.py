"""Layers in columns on several devices: the numbers are those of whole ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from device_names import names
from keras import layers as kl

import tfgpipe

LOSS = keras.losses.SparseCategoricalCrossentropy
WORDS, LENGTH = 11, 5


def words(tied=True):
    """A language model whose every layer has columns."""
    keras.utils.set_random_seed(1)
    table = kl.ReversibleEmbedding(
        WORDS, 6, tie_weights=tied, mask_zero=True, name="words"
    )
    heads = kl.EinsumDense(
        "abc,cde->abde",
        (None, 3, 4),
        bias_axes="de",
        activation="gelu",
        name="heads",
    )
    down = kl.EinsumDense("...xz,xzy->...y", (6,), bias_axes="y", name="down")
    mixed = kl.Dense(
        6,
        "sigmoid",
        kernel_regularizer="l2",
        activity_regularizer="l1",
        name="mixed",
    )
    last = kl.Dense(6, "softmax", name="last")
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = table(tokens)
    for layer in (heads, down, mixed, last):
        layer.supports_masking = True
        x = layer(x)
    return keras.Model(tokens, table(x, reverse=True))


SHARDS = {"words": 2, "heads": 2, "down": 2, "mixed": 2, "last": 2}


def tokens(rows=11):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, WORDS, (2, rows, LENGTH))
    return x, y, rng.random((rows, LENGTH))


def fitted(model, optimizer=None):
    model.compile(
        optimizer or keras.optimizers.Adam(0.01, global_clipnorm=1.0),
        LOSS(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    x, y, weights = tokens()
    history = model.fit(
        x, y, 6, 2, sample_weight=weights, shuffle=False, verbose=0
    ).history
    return [
        *history.values(),
        model.evaluate(x, y, 6, verbose=0),
        model.predict(x, 6, verbose=0),
        *(w.numpy() for w in model.weights),
    ]


def pipeline(model, k=2, m=3, shards=SHARDS, **arguments):
    arguments.setdefault("devices", names(8)[1:3])
    return tfgpipe.GPipe(model, k, m, shards=shards, **arguments)


def assert_close(found, expected, limit=1e-10):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, limit, limit / 100)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("tied", "arguments"),
    [
        (True, {}),
        (True, {"shards": {"words": names(8)[4:7], "mixed": names(8)[5:]}}),
    ],
)
def test_language_model_is_that_of_keras(tied, arguments):
    assert_close(
        fitted(pipeline(words(tied), **arguments)), fitted(words(tied))
    )


def test_devices_get_their_columns_alone():
    """What each device takes of the weights and of their gradients."""
    model = pipeline(words(), shards={"heads": names(8)[5:8]})
    fitted(model)
    seen = {}
    for op in _operations(model):
        for tensor in op.outputs:
            shape = tensor.shape.as_list() if tensor.shape.rank else []
            if len(shape) == 3 and shape[0] == 6 and shape[2] == 4:
                seen.setdefault(op.device[-5:], set()).add(shape[1])
    assert {seen[name[-5:]].pop() for name in names(8)[5:8]} == {1}
    assert not any(seen[name[-5:]] for name in names(8)[5:8])
    assert not {name[-5:] for name in names(8)[1:3]} & {*seen}


def _operations(model):
    x, y, _ = tokens()
    function = tf.function(model.train_step, autograph=False)
    data = tf.constant(x[:6]), tf.constant(y[:6])
    graph = function.get_concrete_function(data).graph
    return graph.get_operations()


def test_program_has_shards_beside_each_other():
    model = pipeline(words(), m=2, shards={"last": names(8)[5:]}, remat="never")
    fitted(model)
    program = model.program(6)
    assert program.num_devices == 5
    times = dict(zip(program.ops, program.simulate(lambda op: 1.0)))
    own = [op for op in program.ops if op.device > 1 and op.micro_batch == 0]
    forward = {times[op] for op in own if op.kind == "forward"}
    assert len(own) == 6
    assert len(forward) == 1
    assert str(program).count("shards") == 3


WRONG = {
    "no such layer": ({"word": 2}, "must name layers that the model calls"),
    "no columns": ({"norm": 2}, "must be of layers that can be computed"),
    "too few columns": ({"dense": names(8)[:4]}, "at most as many"),
    "one device": ({"dense": 1}, "from 2 to the 2 of a replica"),
    "too many": ({"dense": 3}, "from 2 to the 2 of a replica"),
    "twice the same": ({"dense": names(1) * 2}, "each once"),
    "unknown device": ({"dense": [*names(1), "GPU:99"]}, "TensorFlow lists"),
    "no dict": (["dense"], "must map names of layers"),
    "one layer twice": (
        {"dense": 2, "around/dense": 2},
        "must name each layer once",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_shards_are_refused(wrong):
    shards, message = WRONG[wrong]
    layers = [
        keras.Input((4,)),
        kl.LayerNormalization(name="norm"),
        keras.Sequential([kl.Dense(3, name="dense")], name="around"),
    ]
    with pytest.raises(ValueError, match=message):
        tfgpipe.GPipe(layers, 2, 2, devices=names(2), shards=shards)


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


def trained_on_rows(model, loss="mse"):
    model.compile(keras.optimizers.Adam(0.01), loss)
    x = np.random.default_rng(0).standard_normal((9, 4))
    history = model.fit(x, x, 6, 2, shuffle=False, verbose=0).history
    return [
        *history.values(),
        model.evaluate(x, x, 6, verbose=0),
        model.predict(x, verbose=0),
        *(w.numpy() for w in model.weights),
    ]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", [Renamed, ColumnWise])
def test_subclasses_that_compute_columns_have_shards(kind):
    def layers():
        keras.utils.set_random_seed(1)
        return [keras.Input((4,)), kind(6, "tanh", name="wide"), kl.Dense(4)]

    model = pipeline(layers(), shards={"wide": 2})
    expected = trained_on_rows(keras.Sequential(layers()))
    assert_close(trained_on_rows(model), expected)


def test_layers_that_compute_otherwise_are_refused():
    replaced = kl.Dense(4)
    replaced.call = lambda x, training: keras.ops.softmax(x)
    for layer in (Scaled(4), replaced):
        layers = [keras.Input((4,)), layer, kl.Dense(4)]
        with pytest.raises(ValueError, match="is_column_wise"):
            pipeline(layers, shards={layer.name: 2})


class Varied(keras.Model):
    """Calls its layers in evaluation otherwise than in training."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.one, self.other = (kl.Dense(4, "tanh", name=n) for n in "ab")

    def call(self, x, training=False):
        one, other = self.one, self.other
        if self.by == "order" and not training:
            one, other = other, one
        y = other(inputs=one(x))
        return one(y) if self.by == "number" and not training else y


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("by", ["order", "number", "nothing"])
def test_calls_that_cells_were_not_made_for_are_whole(by):
    def model():
        keras.utils.set_random_seed(1)
        made = Varied(by)
        made(np.zeros((2, 4)), training=True)
        return made

    expected = trained_on_rows(model())
    found = trained_on_rows(pipeline(model(), shards={"a": 2, "b": 2}))
    assert_close(found, expected)


def test_heads_in_parts_have_no_shards():
    with pytest.raises(ValueError, match="`head_parts` must be 1"):
        pipeline(words(), head_parts=2)


def attending(heads=3, dropout=0.0, **kwargs):
    """Attention of a sequence to itself, and to another one."""
    keras.utils.set_random_seed(2)
    x, memory = keras.Input((LENGTH, 6)), keras.Input((7, 6))
    own = kl.MultiHeadAttention(heads, 4, name="own", dropout=dropout)
    other = kl.MultiHeadAttention(
        heads, 4, 5, use_bias=False, output_shape=8, name="other"
    )
    y = x + own(x, x, use_causal_mask=True)
    return keras.Model([x, memory], other(y, memory), **kwargs)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("m", "devices"), [(3, 3), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_attention_is_computed_by_heads(m, devices):
    def trained(model):
        model.compile(keras.optimizers.Adam(0.01), "mse")
        rng = np.random.default_rng(0)
        x = [rng.standard_normal((9, n, 6)) for n in (LENGTH, 7)]
        y = rng.standard_normal((9, LENGTH, 8))
        history = model.fit(x, y, 6, 2, shuffle=False, verbose=0).history
        weights = [w.numpy() for w in model.weights]
        return [*history.values(), model.predict(x, verbose=0), *weights]

    shards = dict.fromkeys(("own", "other"), names(8)[4 : 4 + devices])
    model = pipeline(attending(), m=m, shards=shards)
    assert_close(trained(model), trained(attending()))


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:.*an input with a mask")
@pytest.mark.parametrize(
    "residual", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_masks_of_queries_come_to_heads_and_go_on(residual):
    """They were lost: rows of padding attended, and so did what follows."""

    def model():
        keras.utils.set_random_seed(2)
        words = keras.Input((LENGTH,), dtype="int32")
        h = kl.Embedding(WORDS, 6, mask_zero=True)(words)
        y = kl.MultiHeadAttention(3, 4, name="own")(h, h)
        y = kl.Add()([h, y]) if residual else y
        y = (kl.GlobalAveragePooling1D() if residual else kl.Flatten())(y)
        return keras.Model(words, kl.Dense(2)(y))

    def trained(model):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        rng = np.random.default_rng(0)
        x, y = rng.integers(0, 3, (9, LENGTH)), rng.standard_normal((9, 2))
        history = model.fit(x, y, 6, 2, shuffle=False, verbose=0).history
        outputs = model.predict(x, verbose=0)
        return [*history.values(), outputs, *model.get_weights()]

    found = trained(pipeline(model(), m=1, shards={"own": names(8)[4:6]}))
    for a, b in zip(found, trained(model()), strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-12)


@pytest.mark.parametrize("arguments", [{"heads": 1}, {"dropout": 0.1}], ids=str)
def test_attention_that_has_no_columns_is_refused(arguments):
    with pytest.raises(ValueError, match="without dropout"):
        pipeline(attending(**arguments), shards={"own": 2})


def test_masks_of_single_heads_are_refused():
    keras.utils.set_random_seed(2)
    x, mask = keras.Input((LENGTH, 6)), keras.Input((3, LENGTH, LENGTH))
    own = kl.MultiHeadAttention(3, 4, name="own")
    model = keras.Model([x, mask], own(x, x, attention_mask=mask))
    shards = {"own": names(8)[4:6]}
    model = tfgpipe.GPipe(model, 1, 2, devices=names(1), shards=shards)
    model.compile("sgd", "mse")
    rows = [np.ones((4, LENGTH, 6)), np.ones((4, 3, LENGTH, LENGTH))]
    with pytest.raises(ValueError, match="the same for all heads"):
        model.fit(rows, rows[0], verbose=0)


@pytest.mark.filterwarnings("error")
def test_one_cell_with_shards_waits_for_no_other():
    layers = [keras.Input((4,)), kl.Dense(6, name="wide")]
    shards = {"wide": names(8)[4:6]}
    model = tfgpipe.GPipe(layers, 1, devices=names(1), shards=shards)
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 6)), verbose=0)


def test_activations_of_shards_go_to_the_host_and_come_back():
    """After what follows on their cell's device, as those of others."""
    shards = {"wide": names(8)[4:6]}
    layers = [keras.Input((4,)), kl.Dense(6, "tanh", name="wide"), kl.Dense(4)]
    model = tfgpipe.GPipe(
        layers, 1, 6, devices=names(1), shards=shards, remat="offload"
    )
    model.compile("sgd", "mse")
    x = np.ones((12, 4))
    model.fit(x, x, verbose=0)
    program = model.program(12)
    held = program.held()
    assert max(held[1:]) < 6
    times = dict(zip(program.ops, program.simulate(lambda op: 1.0)))
    fetched = [op for op in program.ops if op.kind == "fetch" and op.device]
    assert fetched
    for op in fetched:
        sent = op._replace(kind="offload")
        assert times[op][0] > times[sent][1]


@pytest.mark.usefixtures("float64")
def test_names_may_say_what_is_around_a_layer():
    class Block(kl.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.wide = kl.Dense(8, "gelu", name="wide")
            self.narrow = kl.Dense(4, name="narrow")

        def call(self, x):
            return x + self.narrow(self.wide(x))

    def blocks():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((4,)), *(Block(name=f"block_{i}") for i in range(3))]
        )

    def trained(model):
        model.compile("adam", "mse")
        x = np.random.default_rng(0).standard_normal((8, 4))
        model.fit(x, x[:, ::-1], 8, 2, verbose=0)
        return model, [w.numpy() for w in model.weights]

    _, expected = trained(blocks())
    for shards, count in ({"wide": 2}, 3), ({"block_1/wide": 2}, 1):
        model, found = trained(
            tfgpipe.GPipe(blocks(), 2, 2, devices=names(8)[1:3], shards=shards)
        )
        assert_close(found, expected)
        on_host = [v for v in model.weights if "CPU:0" in v.value.device]
        assert len(on_host) == 2 * count
