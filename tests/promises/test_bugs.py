"""Bugs that were found in use: each test tells one's story."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from beside_keras import assert_close, normal, pipeline, trained
from keras import layers as kl
from kinds import Lookup, Plain, user_loss
from own_layers import Fixed, Outputs
from tiny import assert_same

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


def adamw():
    return keras.optimizers.AdamW(0.1, weight_decay=0.5)


# ----------------------------------------------------------- numbers of Keras
class Pass(kl.Layer):
    def call(self, x):
        return {"a": keras.ops.tanh(x["a"]), "b": x["b"]}


class Keep(kl.Layer):
    def call(self, x):
        return x["a"]


def fork():
    return Outputs(kl.Dense(2), kl.Dense(3))


class Matrix(kl.Layer):
    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], shape[-1]), "glorot_normal")
        self.function = tf.function(
            lambda x: tf.tanh(tf.matmul(x, self.kernel))
        )

    def compute_output_shape(self, shape):
        return shape


class WithFunction(Matrix):
    """Its function reads a weight that is no argument."""

    def call(self, x):
        return x + self.function(x)


class WithTape(Matrix):
    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ self.kernel)
        return tape.gradient(y, x)


class WithRows(Matrix):
    """The gradient of its input is sparse, unless there is one row."""

    def call(self, x):
        return tf.vectorized_map(lambda row: row @ self.kernel, x[:, None])[
            :, 0
        ]


class SparseForSome(Matrix):
    """The gradient of its weight is sparse, unless there is one row."""

    def call(self, x):
        row = self.kernel[1] if x.shape[0] == 1 else tf.gather(self.kernel, 1)
        return x * row


ROWS = normal(3)[:6]
POSITIONS = np.random.default_rng(1).standard_normal((8, 5, 3))
TWO = {"a": normal(2), "b": normal(3)}
WEIGHTS = np.random.default_rng(0).random((7, 5))


def unused():
    return [fork(), Pass(), Pass(), Keep()], normal(4), normal(2), 3


def without_loss():
    return [kl.Dense(4), fork()], normal(4), TWO, 2


# Layers, inputs, labels, K; and what else is told.
NUMBERS = {
    # Zeros are not `None`: weight decay shrank what Keras leaves alone. A tape
    # sees a cell as one operation, and an output without a gradient as one
    # whose gradient is zero. So weights that only lead to an unused tensor got
    # a gradient of zeros, with some K and `remat` but not with others.
    "unused boundary tensor": (unused, {}),
    "unused, computed again": (unused, {"remat": "always"}),
    "unused, kept": (unused, {"remat": "never"}),
    # The same story at the end of the last cell.
    "output without loss": (without_loss, {"loss": {"a": "mse"}}),
    "output without whole loss": (without_loss, {"loss": {"a": user_loss}}),
    # The pipeline added them all up, and Keras takes the first.
    "several losses for one output": (
        lambda: ([kl.Dense(4), kl.Dense(2)], normal(4), normal(2), 2),
        {"loss": ["mse", "mae"]},
    ),
    # Keras divides by the number of weighted values, not of values.
    "weights with more positions than the loss": (
        lambda: (
            [kl.Dense(4), kl.Reshape((1, 4)), kl.Dense(2)],
            normal(4),
            normal(1, 2),
            2,
        ),
        {"fit": {"sample_weight": WEIGHTS}},
    ),
    # As some published models do, which look positions up by rows.
    "layer that needs to know the rows": (
        lambda: (
            [kl.Dense(3), Lookup("constants", "known rows"), kl.Dense(3)],
            POSITIONS,
            POSITIONS,
            2,
        ),
        {},
    ),
    **{
        cls.__name__: (
            lambda cls=cls: (
                [kl.Dense(3, "tanh"), cls(), cls()],
                ROWS,
                ROWS,
                3,
            ),
            # A functional model leaves the function's weight out.
            {"reference": keras.Sequential} if cls is WithFunction else {},
        )
        for cls in (WithFunction, WithTape, WithRows, SparseForSome)
    },
}
QUICK = ("output without loss", "layer that needs to know the rows")


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.filterwarnings("ignore:The model was not tried")  # known rows
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in NUMBERS
    ],
)
def test_numbers_are_those_of_keras(name):
    make, told = NUMBERS[name]
    _, x, y, k = make()
    told = {"loss": "mse", **told}
    remat = told.pop("remat", "except_last")
    reference = told.pop("reference", Plain)
    found, expected = (
        trained(lambda: make()[0], model, x, y, optimizer=adamw(), **told)
        for model in (pipeline(k, k, remat=remat), reference)
    )
    assert_close(found, expected)


@pytest.mark.parametrize("how", ["evaluate", "predict"])
def test_batch_norm_that_always_trains_has_one_rule(how):
    """Outside of `fit` its statistics were means of the micro-batches' own.

    The mean of their variances is not the variance of the mini-batch.
    """

    def statistics(num_micro_batches):
        keras.utils.set_random_seed(5)
        layers = [Fixed(kl.BatchNormalization(), True), kl.Dense(2)]
        model = tfgpipe.GPipe(layers, 2, num_micro_batches)
        model.compile("sgd", "mse")
        data = (normal(4), normal(2)) if how == "evaluate" else (normal(4),)
        getattr(model, how)(*data, batch_size=7, verbose=0)
        return [v.numpy() for v in model.sequence[0].inner.variables]

    for found, expected in zip(statistics(3), statistics(1), strict=True):
        np.testing.assert_allclose(found, expected, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "has_input"),
    [("uint8", True), ("int64", True), ("uint8", False), ("bool", False)],
)
def test_bytes_for_a_first_layer_of_floats_are_cast_first(dtype, has_input):
    """Pixels squared were pixels squared modulo 256.

    `keras.Sequential` casts what it is given to the dtype of its
    `keras.Input`. Without one, too; and convolutions refused pixels.
    """
    x = np.random.default_rng(0).integers(0, 200, (6, 4, 4, 1)).astype(dtype)

    def layers():
        keras.utils.set_random_seed(1)
        return [
            *([keras.Input((4, 4, 1))] if has_input else []),
            kl.Lambda(lambda t: t * t / 200 if has_input else t * 2),
            kl.Conv2D(2, 3, activation="tanh"),
            kl.Flatten(),
        ]

    expected = keras.Sequential(layers()).predict(x, verbose=0)
    model = tfgpipe.GPipe(layers(), 2, 2)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), expected, 1e-5, 1e-6
    )
    model.compile("sgd", "mse")
    model.train_on_batch(x, np.ones((6, 8)))
    if dtype != "int64":  # which Keras refuses, too
        pixels = tfgpipe.GPipe([kl.Conv2D(2, 3), kl.Flatten()], 2)
        assert pixels.predict(x, verbose=0).shape == (6, 8)


class Branches(kl.Layer):
    """Four tensors of one, in an order that the next layer does not keep."""

    def __init__(self, order, **kwargs):
        super().__init__(**kwargs)
        self.order = order
        self.branches = [kl.Dense(8, "tanh") for _ in range(4)]

    def build(self, shape):
        for branch in self.branches:
            branch.build((None, 8))

    def call(self, xs):
        x = sum(xs[i] for i in self.order) if self.order else xs
        return tuple(branch(x) for branch in self.branches)


class Product(kl.Layer):
    def call(self, xs):
        return xs[0] * xs[1] + xs[2] * xs[3]


def test_gradients_of_branches_are_added_in_one_order_wherever_a_cell_ends():
    x = normal(8)

    def make():
        return [Branches(()), Branches((3, 1, 0, 2)), Product()]

    def weights(k):
        return trained(make, pipeline(k, 2), x, x, optimizer=adamw())[1]

    assert_same(weights(1), weights(3))


# ------------------------------------------------------------ data of all kinds
def batches(*shapes):
    """Batches of rows that are known at run time only, and so is their end."""

    def generate():
        rng = np.random.default_rng(0)
        for rows in (8, 8, 3):
            yield tuple(rng.random((rows, *shape)) for shape in shapes)

    return tf.data.Dataset.from_generator(
        generate,
        output_signature=tuple(
            tf.TensorSpec((None, *shape), tf.float64) for shape in shapes
        ),
    )


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_nothing_is_updated_where_data_ends():
    """Keras runs the step once more to find the end of the data.

    What did not wait for the data was updated, or not: equal runs differed.
    """

    def train(k):
        keras.utils.set_random_seed(1)
        layers = [kl.Dense(4), kl.Dropout(0.5, seed=1), kl.Dense(4)]
        model = tfgpipe.GPipe([*layers, kl.Dense(1)], k, 2)
        adam = keras.optimizers.Adam(weight_decay=0.1, use_ema=True)
        model.compile(adam, "mse", metrics=["mae"])
        data = batches((3,), (1,))
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        history |= model.evaluate(data, return_dict=True, verbose=0)
        model.predict(batches((3,)), verbose=0)
        assert model.optimizer.iterations.numpy() == 6
        assert layers[1].seed_generator.state.numpy()[1] == 6 * 2
        return history, [*model.get_weights(), *model.optimizer.variables]

    first, other = train(1), train(3)
    assert other[0] == first[0]
    assert_same(other[1], first[1])


class SumOfKeys(kl.Layer):
    def call(self, x):
        return keras.ops.sum(list(x.values()), 0)


def test_inputs_of_more_keys_than_were_built_for_go_to_the_layer():
    """They failed with "Too few leaves for PyTreeSpec"."""
    two = {key: np.ones((4, 3)) for key in "ab"}
    three = {**two, "aa": np.ones((4, 3))}
    found = []
    for make in (keras.Sequential, lambda x: tfgpipe.GPipe(x, 2)):
        keras.utils.set_random_seed(1)
        model = make([SumOfKeys(), kl.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(two, np.ones((4, 1)), verbose=0)
        found.append(model.predict(three, verbose=0))
    np.testing.assert_allclose(*found, 1e-5)


# ------------------------------------------------------------------- refusals
class Similarities(kl.Layer):
    """Of all rows with all rows, as in contrastive losses."""

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(x))


class Doubled(kl.Layer):
    def call(self, x):
        return keras.ops.concatenate([x, x], 0)


class Python(kl.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.py_function(tf.sin, [x], x.dtype), x.shape)


class SumOfRows(kl.Layer):
    def call(self, x):
        return keras.ops.sum(x["a"], -1, keepdims=True) + x["b"]


def shorter(*labels):
    """Of two inputs, one lacks a row."""
    shapes = [(3,), (3,), *labels]
    return batches(*shapes).map(lambda a, b, *y: ({"a": a, "b": b[:-1]}, *y))


IDS, OF_IDS = np.ones((4, 4), "int32"), np.ones((4, 4, 2))
# Layers, a method and its arguments, and what is said.
REFUSED = {
    # With as many rows as steps they weighed steps, or rows if M > 1.
    "weights of rows for steps": (
        lambda: [kl.Embedding(9, 3), kl.Dense(2)],
        "train_on_batch",
        lambda: (IDS, OF_IDS, np.arange(4.0)),
        "one weight for each value",
    ),
    "weights of rows for other steps": (
        lambda: [kl.Embedding(9, 3), kl.Dense(2)],
        "train_on_batch",
        lambda: (np.ones((4, 5)), np.ones((4, 5, 2)), np.arange(4.0)),
        "one weight for each value",
    ),
    "gradient of Python": (
        lambda: [kl.Dense(3), Python(), kl.Dense(3)],
        "train_on_batch",
        lambda: (normal(3), normal(3)),
        r"gradient of `tf\.py_function`",
    ),
    # The shorter one was split into micro-batches that did not belong.
    **{
        f"inputs of other rows: {method}": (
            lambda: [SumOfRows(), kl.Dense(1)],
            method,
            lambda labels=labels: (shorter(*labels),),
            "rows everywhere",
        )
        for method, labels in (
            ("fit", [(1,)]),
            ("evaluate", [(1,)]),
            ("predict", []),
        )
    },
    "outputs of more rows": (
        lambda: [kl.Dense(4), Doubled()],
        "predict",
        lambda: (np.ones((8, 3)),),
        "row for each row of the",
    ),
    "outputs of more rows, known late": (
        lambda: [kl.Dense(4), Doubled()],
        "predict",
        lambda: (batches((3,)),),
        "row for each row of the",
    ),
}


@pytest.mark.filterwarnings("ignore:.*EagerPyFunc, which has side effects")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_numbers_of_keras_is_refused(name):
    layers, method, arguments, words = REFUSED[name]
    model = tfgpipe.GPipe(layers(), 2, 2)
    model.compile("sgd", "mse")
    quiet = {} if method == "train_on_batch" else {"verbose": 0}
    quiet |= {"shuffle": False} if method == "fit" else {}
    errors = (tf.errors.InvalidArgumentError, ValueError)
    with pytest.raises(errors, match=words):
        getattr(model, method)(*arguments(), **quiet)
    assert model.optimizer.iterations.numpy() == 0


def test_an_axis_of_all_rows_inside_of_a_list_is_tried():
    """As in a functional model, whose outputs alone are refused."""
    total = kl.Lambda(lambda x: keras.ops.sum(x, 1, keepdims=True))
    layers = [keras.Input((3,)), kl.Dense(4), Similarities(name="across")]
    model = tfgpipe.GPipe([*layers, total], 2, 2)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((8, 3))
    with pytest.warns(UserWarning, match="'across'"):
        model.fit(x, x[:, :1], batch_size=8, verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_outputs_of_any_length_have_rows():
    """No alarm for sequences, and shapes that are known late."""
    layers = [keras.Input((None, 4)), kl.Dense(4), kl.Reshape((-1, 2))]
    layers += [kl.LSTM(3, return_sequences=True)]
    model = tfgpipe.GPipe(layers, 3, 2)
    assert model.predict(np.ones((5, 6, 4)), verbose=0).shape == (5, 12, 3)
    assert model.predict(batches((3, 4)), verbose=0).shape == (19, 6, 3)


# ----------------------------------------------------- what the process shares
class Called(Matrix):
    """Calls a function of TensorFlow, which is traced anew for each cell."""

    meet = staticmethod(bool)

    def call(self, x):
        y = self.function(x)
        self.meet()
        return y


def test_models_that_two_threads_train_are_as_if_one_thread_did():
    """What was replaced in TensorFlow while one traced, the other called.

    Whoever left last put back what the other had put there, for good: later
    models differentiated within the operations of an earlier one.
    """

    def train(model):
        model.fit(normal(4), normal(4), batch_size=7, verbose=0)

    def trained(meet, in_threads):
        models = []
        for seed in (1, 2):
            keras.utils.set_random_seed(seed)
            layers = [keras.Input((4,)), kl.Dense(4), Called(), kl.Dense(4)]
            models.append(tfgpipe.GPipe(layers, 2))
            models[-1].layers[1].meet = meet
            models[-1].compile("sgd", "mse")
        threads = [threading.Thread(target=train, args=[m]) for m in models]
        for thread in threads:
            thread.start()
            if not in_threads:
                thread.join()
        for thread in threads:
            thread.join()
        return [w for model in models for w in model.get_weights()]

    both = threading.Barrier(2, timeout=20)
    expected = trained(bool, in_threads=False)
    assert_same(trained(both.wait, in_threads=True), expected)
    assert_same(trained(bool, in_threads=False), expected)


class Holder(kl.Layer):
    """Keeps tensors and variables where a walk over Python finds them."""

    supports_masking = True

    def build(self, shape):
        self.inner = kl.Dense(shape[-1])
        self.inner.build(shape)
        self.kept = {"of_storage": self.inner.kernel.value.handle}
        self.constant = tf.constant(2.0, tf.float64)

    def call(self, x):
        return self.inner(x) * self.constant


def asked_of_eager_tensors(monkeypatch, function):
    """Names of attributes set on eager tensors, and whether `__dict__` was."""
    base = next(
        cls
        for cls in type(tf.zeros([])).__mro__
        if cls.__name__ == "_EagerTensorBase"
    )
    asked = set()
    read = base.__getattribute__

    def set_attribute(tensor, name, value):
        asked.add(name)
        object.__setattr__(tensor, name, value)

    def get_attribute(tensor, name):
        if name == "__dict__":
            asked.add(name)
        return read(tensor, name)

    with monkeypatch.context() as patch:
        patch.setattr(base, "__setattr__", set_attribute, raising=False)
        patch.setattr(base, "__getattribute__", get_attribute)
        function()
    return asked


def test_nothing_is_set_on_eager_tensors_that_keras_does_not_set(monkeypatch):
    """A name set on the handle of each variable ended the process.

    Python makes a dict for it; a collection of garbage in the middle made a
    second one of the same array, and a later one died (TensorFlow 2.21).
    """

    def train(make, eagerly):
        inputs = keras.Input((4,), dtype="int32")
        x = kl.Embedding(9, 6, mask_zero=True)(inputs)
        x = kl.BatchNormalization()(kl.Dropout(0.5, seed=1)(Holder()(x)))
        model = make(keras.Model(inputs, kl.Dense(1)(kl.LSTM(3)(x))))
        model.compile("adam", "mse", metrics=["mae"], run_eagerly=eagerly)
        data = np.arange(32).reshape(8, 4) % 9, np.ones((8, 1))
        model.fit(*data, batch_size=4, verbose=0)
        model.evaluate(*data, verbose=0)
        model.predict(data[0], verbose=0)

    def of_keras():
        train(lambda model: model, eagerly=True)  # masks are attributes, too

    def of_gpipe():
        train(lambda model: tfgpipe.GPipe(model, 2, 2), eagerly=False)

    by_gpipe = asked_of_eager_tensors(monkeypatch, of_gpipe)
    assert not by_gpipe - asked_of_eager_tensors(monkeypatch, of_keras)
