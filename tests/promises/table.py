"""One table of promises: a case is plain data, and one function compares it.

    assert_same(Case("tied", k=4, m=3, schedule="1f1b"), "keras")

trains a pipeline and what it is to be equal to. A feature of pipelines is a
value of `Case.feature`, whatever it is told by: a rule, an argument, compiling.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from device_names import names
from functional import FUNCTIONAL, Twice
from keras import layers as kl
from kinds import (
    KINDS,
    Kind,
    Lookup,
    Plain,
    attention,
    crossentropy,
    normal,
    tokens,
    user_loss,
)
from matrix import OPTIMIZERS, WHOLE, arguments, largest_difference
from sharing_layers import Counter
from with_columns import shards_of

import tfgpipe

ROWS = 11  # in batches of 8: 8 and a last one of 3 rows
# What a pipeline is told besides, by the name; those of `MODES` when it is
# compiled.
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "a large share": {"remat": 0.98},
    "a share": {"remat": 0.5},
    "a share and a rule": {"remat": {0: 0.8, 1: "always"}},
    "groups": {"remat_groups": 2},
    "head in parts": {"head_parts": 2},
    "offload": {"remat": "offload"},
    "shards": {"shards": names(8)[6:]},
    "skipping": {"skip_nonfinite": True},
    "weights on the host": {"weights_on": "host"},
}
MODES: dict[str, dict[str, Any]] = {
    "eagerly": {"run_eagerly": True},
    "several steps": {"steps_per_execution": 2},
}
# They add up in another order than pipelines without them.
ROUNDS = ("eagerly", "head in parts", "shards")
# The last layers of these do what parts do not add up to.
WHOLE_HEADS = {"between", "noisy", *WHOLE}
LOOPS = {"masked_sequence", "masked_summary"}


POINT = ("model", "k", "m", "schedule")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str  # one of `MODELS`
    k: int = 2
    m: int = 3  # micro-batches of a replica
    schedule: str = "gpipe"  # or "written"
    remat: str = "except_last"  # or "mapping" for several rules
    feature: str = "none"  # one of `FEATURES` or `MODES`
    replicas: int = 1
    optimizer: str = "momentum"
    epochs: int = 1  # one of them is one step
    infers: bool = False  # compares validation and prediction, too
    compiled: bool = False  # by XLA

    def __str__(self) -> str:
        """The point, and what is not the default of the rest."""
        values = dataclasses.asdict(self)
        point = [values.pop(name) for name in (*POINT, "remat")]
        defaults = dataclasses.asdict(Case(self.model))
        rest = {k: v for k, v in values.items() if v != defaults[k]}
        named = [k if v is True else f"{v}" for k, v in rest.items()]
        return "-".join(map(str, [*point, *named]))


# ------------------------------------------------------------------ the models
class Pair(kl.Layer):
    """Hands on a pair, and uses each part several times."""

    def __init__(self, first=False, **kwargs):
        super().__init__(**kwargs)
        self.first = first
        self.a, self.b = kl.Dense(8), kl.Dense(8)
        self.norm, self.dropout = kl.BatchNormalization(), kl.Dropout(0.2)

    def build(self, shape):
        for layer in (self.a, self.b, self.norm, self.dropout):
            layer.build((None, 8))

    def call(self, x):
        h, before = (x, x) if self.first else x
        t = self.norm(self.a(keras.ops.relu(h))) + self.b(before)
        u = self.dropout(t) * h + keras.ops.tanh(before) + t * before
        return keras.ops.tanh(u + h), h


class Product(kl.Layer):
    def call(self, x):
        return x[0] * x[1]


def pairs():
    return [kl.Dense(8), Pair(first=True), Pair(), Product()]


def noisy():
    """Layers whose numbers depend on the micro-batch and on seeds."""
    layers = [kl.Dense(6, activation="tanh"), Counter(name="counter")]
    for _ in range(2):
        layers += [kl.Dropout(0.3), kl.BatchNormalization(), kl.Dense(6)]
    return layers


def drawing():
    """Layers that draw and keep state, a loop among them."""
    return [
        kl.Dense(8, "gelu"),
        kl.Dropout(0.3, seed=1),
        kl.LayerNormalization(),
        kl.Conv1D(8, 3, padding="same", activation="swish"),
        kl.BatchNormalization(),
        kl.GRU(4, recurrent_dropout=0.2, seed=2, return_sequences=True),
        kl.GaussianNoise(0.1, seed=3),
        kl.Flatten(),
        kl.Dense(2, "softplus"),
    ]


class Residual(kl.Layer):
    """A block, of which a model has several."""

    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.norm = kl.LayerNormalization()
        self.wide, self.narrow = kl.Dense(16, "gelu"), kl.Dense(units)

    def call(self, x):
        return x + self.narrow(self.wide(self.norm(x)))


def blocks():
    """A language model of equal blocks, where cells begin at regions."""
    return [
        kl.Embedding(20, 8),
        *(Residual() for _ in range(6)),
        kl.Dense(20, name="logits"),
    ]


def of_logits():
    return {"loss": keras.losses.SparseCategoricalCrossentropy(True)}


def drawn_mask():
    """A mask that depends on what layers compute."""
    return [
        kl.Dense(4, activation="relu"),
        kl.Dropout(0.5, seed=1),
        kl.Masking(0.0),
        kl.SimpleRNN(4, return_sequences=True),
        kl.Dense(2),
    ]


class Attends(kl.Layer):
    """Takes the mask off one of two names of a tensor."""

    def build(self, shapes):
        self.attention = kl.MultiHeadAttention(2, 3)
        self.attention.build(*shapes)

    def call(self, pair):
        return self.attention(pair[0], pair[0]), pair[1]


class Pools(kl.Layer):
    def build(self, shapes):
        self.pool = kl.GlobalAveragePooling1D()

    def call(self, pair):
        return self.pool(pair[0]) + self.pool(pair[1])


def masked_twice():
    embedding = kl.Embedding(9, 4, mask_zero=True)
    return [embedding, Twice(), Attends(), Pools(), kl.Dense(2)]


class Mapped(kl.Layer):
    """Of its loop, which has no gradient, the result alone is kept."""

    def call(self, x):
        scale = tf.map_fn(lambda row: row * 2.0, x)
        return tf.stop_gradient(scale) * keras.ops.gelu(x)


def mapped():
    first, second = kl.Dense(32, "gelu"), kl.Dense(16, "gelu")
    return [first, Mapped(), second, kl.Flatten(), kl.Dense(2)]


class Doubled(kl.Layer):
    """Its gradient depends on nothing."""

    def call(self, x):
        return 2 * x


def doubled():
    return [kl.Dense(3), kl.Dense(3), Doubled(), kl.Dense(2)]


class Frozen(kl.Dense):
    """Reads its weight where a gradient is its own."""

    def call(self, x):
        return tf.recompute_grad(lambda x: tf.tanh(x @ self.kernel))(x)


def recomputes_frozen():
    frozen = Frozen(5, trainable=False)
    return [kl.Dense(5), frozen, kl.Dense(4), kl.Dense(2)]


def columns():
    """A language model whose every layer has columns."""
    table = kl.ReversibleEmbedding(11, 6, mask_zero=True, name="words")
    heads = kl.EinsumDense(
        "abc,cde->abde", (None, 3, 4), bias_axes="de", activation="gelu"
    )
    down = kl.EinsumDense("...xz,xzy->...y", (6,), bias_axes="y")
    regularized = {"kernel_regularizer": "l2", "activity_regularizer": "l1"}
    mixed = kl.Dense(6, "sigmoid", **regularized)
    x = words = keras.Input((5,), dtype="int32")
    for layer in (table, heads, down, mixed, kl.Dense(6, "softmax")):
        layer.supports_masking = True
        x = layer(x)
    return keras.Model(words, table(x, reverse=True))


def attending():
    """Attention of a sequence to itself, and to another one; padding."""
    words, memory = keras.Input((5,), dtype="int32"), keras.Input((7, 6))
    h = kl.Embedding(9, 6, mask_zero=True)(words)
    own = kl.MultiHeadAttention(3, 4)(h, h, use_causal_mask=True)
    options = {"use_bias": False, "output_shape": 8}
    other = kl.MultiHeadAttention(3, 4, 5, **options)(h + own, memory)
    return keras.Model([words, memory], kl.Dense(2)(kl.Flatten()(other)))


class Positions(kl.Layer):
    """Makes numbers of positions, which are the same for all rows."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, shape[-1]), name="table")

    def call(self, x):
        return keras.ops.tanh(self.table[: keras.ops.shape(x)[1]])


class Head(kl.Layer):
    """Adds them, and turns the sum into words."""

    def build(self, x_shape, positions_shape):
        self.kernel = self.add_weight(shape=(x_shape[-1], 13), name="kernel")

    def call(self, x, positions):
        return keras.ops.matmul(x + positions[None], self.kernel)


def without_rows():
    """What comes to the head has as many positions as there are rows."""
    x = keras.Input((None,), dtype="int32")
    h = kl.Embedding(13, 4)(x)
    return keras.Model(x, Head()(h, Positions()(h)))


def probabilities():
    return [*attention()[:-1], kl.Dense(13), kl.Activation("softmax")]


def smoothed():
    """And a metric of outputs as they are."""
    return {
        "loss": keras.losses.CategoricalCrossentropy(True, 0.2),
        "metrics": [lambda y, y_pred: keras.ops.max(y_pred, -1)],
    }


IDS = tokens(4, 13, False)
MODELS: dict[str, Kind] = {
    **KINDS,
    **FUNCTIONAL,
    "attending": Kind(
        attending, lambda rng: [tokens(5, 9)(rng), normal(7, 6)(rng)], normal(2)
    ),
    "columns": Kind(columns, tokens(5, 11), tokens(5, 11, False), of_logits),
    "doubled": Kind(doubled, normal(3), normal(2)),
    "drawing": Kind(drawing, normal(6, 8), normal(2)),
    "drawn_mask": Kind(drawn_mask, normal(5, 2), normal(5, 2)),
    "masked_twice": Kind(
        masked_twice, lambda rng: rng.integers(0, 3, (19, 6)), normal(2)
    ),
    "whole_metric": dataclasses.replace(
        KINDS["dense"], compile=lambda: {"loss": "mse", "metrics": [user_loss]}
    ),
    "blocks": Kind(
        blocks, tokens(3, 20, False), tokens(3, 20, False), of_logits
    ),
    "lookups": Kind(  # by token, with a slice a row, and by position
        lambda: [
            kl.Dense(3),
            Lookup("tokens", "distances", "sizes", "rows"),
            kl.Dense(3),
        ],
        normal(5, 3),
        normal(5, 3),
    ),
    "ignored": Kind(attention, IDS, IDS, crossentropy(ignore_class=3)),
    "mapped": Kind(mapped, normal(6, 8), normal(2)),
    "noisy": Kind(noisy, normal(5), normal(6)),
    "pairs": Kind(pairs, normal(8), normal(8)),
    "probabilities": Kind(
        probabilities,
        IDS,
        IDS,
        lambda: {"loss": "sparse_categorical_crossentropy"},
    ),
    "recomputes_frozen": Kind(recomputes_frozen, normal(5), normal(2)),
    "smoothed": Kind(
        attention, IDS, lambda rng: np.eye(13)[IDS(rng)], smoothed
    ),
    "without_rows": Kind(without_rows, IDS, IDS, of_logits),
}


# -------------------------------------------------------------- what is trained
def train(kind, make, optimizer, epochs=1, infers=False, model=None):
    """Trains; returns the model, its history and outputs if it infers."""
    rng = np.random.default_rng(3)
    if model is None:
        keras.utils.set_random_seed(5)
        model = make(kind.layers())
        model.compile(optimizer, **kind.compile())
    x, y = keras.tree.map_structure(
        lambda rows: rows[:ROWS], (kind.x(rng), kind.y(rng))
    )
    fit = kind.fit(rng)
    if "sample_weight" in fit:
        fit["sample_weight"] = fit["sample_weight"][:ROWS]
    steps = {"steps_per_epoch": 1} if epochs == 1 else {}
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(x, y) if infers else None,
        **steps,
        **fit,
    )
    outputs = model.predict(x, 8, verbose=0) if infers else None
    return model, history.history, outputs


def _numbers(model, history, outputs):
    history = {k: v for k, v in history.items() if k != "skipped_steps"}
    variables = [*model.variables, *model.optimizer.variables]
    return [v.numpy() for v in variables], history, outputs


def _plain(layers):
    return layers if isinstance(layers, keras.Model) else Plain(layers)


@functools.cache
def of_keras(name, optimizer, epochs, infers):
    """What plain Keras gives."""
    kind = MODELS[name]
    options = kind.compile()
    # Eagerly it need not be traced, but weighs several losses otherwise.
    if not isinstance(options.get("loss"), (dict, list)):
        options["run_eagerly"] = True
    kind = dataclasses.replace(kind, compile=lambda: options)
    optimizer = OPTIMIZERS[optimizer]()
    return _numbers(*train(kind, _plain, optimizer, epochs, infers))


def pipeline(case, layers):
    """The pipeline of a case, not compiled."""
    options = arguments(case.k, case.m, case.schedule, case.remat)
    # Regions are groups, and some of these have few layers.
    if case.model == "blocks" or isinstance(layers, keras.Model):
        options.pop("remat_groups", None)
    options |= FEATURES.get(case.feature, {})
    if isinstance(options.get("shards"), list):
        devices = options["shards"]
        listed = getattr(layers, "layers", layers)
        options["shards"] = shards_of(listed, devices, len(devices))
        if case.replicas > 1:  # those of a replica
            options["shards"] = dict.fromkeys(options["shards"], case.k)
    if case.replicas == 1:
        return tfgpipe.GPipe(layers, **options)
    devices = options.pop("devices", None)
    width = len(devices or ()) or case.k
    width = getattr(options["schedule"], "num_devices", width)
    with tfgpipe.PipelineStrategy(case.replicas, width).scope():
        return tfgpipe.GPipe(layers, **options)


def trained(case):
    """The model of a case, and its numbers."""
    mode = MODES.get(case.feature, {})
    if case.compiled:
        mode = {**mode, "jit_compile": True}
    kind = MODELS[case.model]
    kind = dataclasses.replace(
        kind, compile=lambda: {**MODELS[case.model].compile(), **mode}
    )
    found = train(
        kind,
        functools.partial(pipeline, case),
        OPTIMIZERS[case.optimizer](),
        case.epochs,
        case.infers,
    )
    return found[0], _numbers(*found)


@functools.cache
def numbers(case, policy):
    """Those of a pipeline, by the policy of its layers."""
    return trained(case)[1]


def assert_same(case, against, tolerance=1e-10):
    """Trains a case, and compares variables, history and outputs."""
    if against == "keras":
        model, found = trained(case)
        assert len(model.cells()) == case.k
        expected = of_keras(
            case.model, case.optimizer, case.epochs, case.infers
        )
    else:
        found = trained(case)[1]
        expected = numbers(against, keras.config.dtype_policy().name)
    _compare(found, expected, tolerance)


def assert_file_goes_on(case, **changes):
    """Saves a trained case; loaded with other cells it trains on as that."""
    model, _ = trained(case)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = tfgpipe.load_model(path, **changes)
    found, expected = (
        _numbers(*train(MODELS[case.model], None, None, model=one))
        for one in (loaded, model)
    )
    _compare(found, expected, 0)


def _compare(found, expected, tolerance):
    assert found[1].keys() == expected[1].keys()
    if tolerance:
        worst = [largest_difference(*both) for both in zip(found, expected)]
        assert max(worst) < tolerance
        return
    for a, b in zip(*map(keras.tree.flatten, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
