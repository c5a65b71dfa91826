"""Layers that treat a batch otherwise than its parts are told by trying."""

import warnings

import keras
import pytest
import tensorflow as tf
from row_operations import APART as TREATS
from row_operations import AT_TIMES, PLACES
from row_operations import MIXING as MIXES
from tried import said_of

import tfgpipe

ops = keras.ops
WEIGHT = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
# Of x, of shape (rows, 4, 3).
MIXING = {
    "branches": lambda x: ops.cond(ops.mean(x) > 0, lambda: x, lambda: 2.0 * x),
    "mean over rows": lambda x: x - ops.mean(x, axis=0),
    "moments": lambda x: x / ops.sqrt(ops.moments(x, axes=[0, 1])[1] + 1.0),
    "merged rows": lambda x: ops.max(ops.reshape(x, (-1, 3)), axis=0),
    "along the last axis": lambda x: tf.nn.softmax(ops.transpose(x)),
    "less the first row": lambda x: x - x[:1],
    "products along rows": lambda x: tf.matmul(
        x[:, 0], x[:, 1], transpose_a=True
    ),
    "histogram": lambda x: tf.cast(
        tf.math.bincount(tf.cast(ops.abs(ops.reshape(x, (-1,))), "int32")),
        "float32",
    ),
    "the longest text": lambda x: tf.RaggedTensor.from_tensor(
        x[..., 0], ops.cast(1.0 + 3.0 * ops.sigmoid(x[:, 0, 0]), "int64")
    ).to_tensor(),
    "half the squares": lambda x: x / tf.nn.l2_loss(x),
}
APART = {
    "elements": lambda x: ops.tanh(2.0 * x + 1.0),
    "mean of all of a row": lambda x: ops.mean(x, axis=(1, 2)),
    "rows last, and back": lambda x: ops.transpose(
        ops.mean(ops.transpose(x), axis=0, keepdims=True)
    ),
    "merged, and back": lambda x: ops.reshape(
        ops.softmax(ops.reshape(x, (-1, 3))), (-1, 4, 3)
    ),
    "a slice of all rows": lambda x: x[0 : x.shape[0]],
    "mask by length": lambda x: tf.sequence_mask(
        ops.cast(x[:, 0, 0], "int32"), 4, "float32"
    ),
    "of the number of rows": lambda x: ops.zeros((ops.shape(x)[0], 2)),
    "an unused mean": lambda x: (ops.mean(x, axis=0), x)[1],
    "repeated": lambda x: (
        ops.mean(ops.broadcast_to(x, (4, *map(int, x.shape))), 0)
        if x.shape[0]
        else x
    ),
    "a step of each": lambda x: tf.reshape(x, (-1, 3))[::4],
    "called": tf.function(
        lambda x: ops.mean(ops.transpose(x, (1, 0, 2)), axis=0)
    ),
    "a told length": lambda x: tf.RaggedTensor.from_row_lengths(
        ops.reshape(x, (-1,)), 12 * ops.ones_like(x[:, 0, 0], "int64")
    ).to_tensor(shape=(None, 12)),
    "weights alone": lambda x: x * ops.mean(WEIGHT),
}


def number(x):
    return ops.cast(ops.shape(x)[0], "float32")


def codes(x):
    return ops.one_hot(ops.argmax(ops.reshape(x, (-1, 3)), axis=-1), 3)


# Of x, of shape (rows, 4, 3).
MEANS = {
    "mean": lambda x: ops.mean(x, axis=0),
    "sum of shares": lambda x: ops.sum(ops.square(x) / number(x), axis=(0, 1)),
    "guarded": lambda x: ops.sum(x) / (ops.maximum(number(x), 1.0) + 1e-7),
    "running": lambda x: 0.9 * tf.ones((3,)) + 0.1 * ops.mean(x, axis=(0, 1)),
    "of products": lambda x: (
        ops.matmul(ops.transpose(codes(x)), ops.reshape(x, (-1, 3))) / number(x)
    ),
    "linear in means": lambda x: (
        ops.sum(ops.mean(x, 0) @ WEIGHT, axis=-1)[1:] - 2.0 * ops.mean(x)
    ),
}
NOT_MEANS = {
    "sum": lambda x: ops.sum(x, 0),
    "number": lambda x: number(x),
    "one more": lambda x: ops.sum(x) / (number(x) + 1.0),
    "square of a mean": lambda x: ops.square(ops.mean(x)),
    "masked": lambda x: (
        ops.sum(x) / ops.sum(ops.cast(ops.greater(x, 0), "float32"))
    ),
    "largest": lambda x: ops.max(x, axis=0),
    "mean by number": lambda x: ops.mean(x) / number(x),
    "queue": lambda x: ops.concatenate([x, tf.ones((2, 4, 3))])[:2],
}


class Own(keras.layers.Layer):
    """Returns, or adds to the loss, or keeps what a function makes."""

    def __init__(self, function, use):
        super().__init__(name="own")
        self.function, self.use = function, use

    def build(self, shape):
        if self.use == "state":
            like = self.function(tf.ones((2, 4, 3)))
            self.kept = self.add_weight(
                like.shape, "zeros", like.dtype, trainable=False, name="kept"
            )

    def call(self, x):
        made = self.function(x)
        if self.use == "loss":
            self.add_loss(ops.sum(made))
        if self.use == "state":
            self.kept.assign(0.9 * self.kept + made)
        return made if self.use == "outputs" else x


def said(function, use="outputs", rows=None):
    layer = Own(function, use)
    layer.build((rows, 4, 3))
    return said_of([layer], (rows, 4, 3))


@pytest.mark.parametrize("name", MIXING)
def test_mixed_rows_are_found(name):
    (message,) = said(MIXING[name])
    assert "mixes the rows of a batch" in message


def mixing():
    """Each operation in two of the places; in another order rows have means."""
    places = list(PLACES)
    for i, name in enumerate(sorted(MIXES.keys() - AT_TIMES)):
        yield places[i % 6], name, "outputs"
        if name not in ("roll", "sort"):
            yield places[(i + 3) % 6], name, ("loss", "state")[i % 2]


@pytest.mark.parametrize(("place", "name", "use"), [*mixing()])
def test_rows_are_mixed_in_branches_loops_and_functions(place, name, use):
    """Where what treats rows apart comes before and behind."""

    def call(x):
        x = PLACES["loop"](TREATS["tanh"], x)
        x = tf.ensure_shape(PLACES[place](MIXES[name], x), x.shape)
        x = PLACES["branch"](TREATS["scale"], x)
        return x if use == "outputs" else ops.mean(x**2, axis=0)

    assert any("'own'" in text for text in said(call, use))


@pytest.mark.parametrize("use", ["outputs", "loss", "state"])
def test_rows_are_apart_in_branches_loops_and_functions(use):
    """All operations, in all places, one after the other."""

    def call(x):
        for i, name in enumerate(sorted(TREATS)):
            place = sorted(PLACES)[i % len(PLACES)]
            x = tf.ensure_shape(PLACES[place](TREATS[name], x), x.shape)
        return x if use == "outputs" else ops.mean(x**2, axis=0)

    assert not said(call, use)


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_not_mixed_are_left_alone(name):
    assert not said(APART[name])


@pytest.mark.parametrize("name", MEANS)
def test_means_over_rows_are_left_alone(name):
    assert not said(MEANS[name], "loss")
    assert not said(MEANS[name], "state")


@pytest.mark.parametrize("name", NOT_MEANS)
def test_what_is_no_mean_is_found(name):
    (message,) = said(NOT_MEANS[name], "loss")
    assert "gives `add_loss`" in message


# What shows where there are as many rows as in a mini-batch: of x and `number`.
OF_MANY = {
    "outputs": lambda x: ops.where(number(x) >= 8, x, 2.0 * x),
    "loss": lambda x: ops.mean(ops.square(x[:6])),
    "state": lambda x: ops.where(number(x) >= 6, ops.mean(x), 0.0),
}


@pytest.mark.parametrize("rows", [8, None])
@pytest.mark.parametrize("use", OF_MANY)
def test_what_a_mini_batchs_rows_alone_show_is_found(use, rows):
    (message,) = said(OF_MANY[use], use, rows)
    assert message.startswith("Layer 'own' ")


def test_rows_of_arrays_are_as_many_as_those_of_a_batch():
    layer = Own(lambda x: ops.where(number(x) > 40, 2.0 * x, x), "outputs")
    model = tfgpipe.GPipe(
        [keras.Input((4, 3)), keras.layers.Dense(3), layer], 1, 2
    )
    model.compile("sgd", "mse")
    x = tf.ones((90, 4, 3))
    with pytest.warns(UserWarning, match="'own' mixes the rows") as found:
        model.fit(x, x, batch_size=45, verbose=0)
    assert len(found) == 1
    with warnings.catch_warnings():  # not for each phase
        warnings.simplefilter("error")
        model.evaluate(x, x, batch_size=45, verbose=0)


def warned(layers, x, count=2, **arguments):
    """What is said of layers in `predict` and a step."""
    cut = {"layers_per_cell": [len(layers), 1], **arguments}
    model = tfgpipe.GPipe([*layers, keras.layers.Dense(2)], 2, count, **cut)
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.train_on_batch(x, tf.ones((len(x), 2)))
    return [str(w.message) for w in found]


class Counts(keras.layers.Layer):
    """Mixes rows, or adds a sum of them, from some step on."""

    def __init__(self, first, use, dtype):
        super().__init__(name="own")
        self.first, self.use = first, use
        self.steps = self.add_weight((), "zeros", dtype, trainable=False)

    def call(self, x):
        is_on = ops.cast(self.steps >= self.first, x.dtype)
        self.steps.assign(self.steps + 1)
        if self.use == "loss":
            self.add_loss(is_on * ops.sum(x))
            return x
        return x - is_on * ops.mean(x, 0)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("use", ["loss", "outputs"])
@pytest.mark.parametrize("first", [1, 100])
def test_what_shows_in_later_steps_is_found(first, use, dtype):
    x = tf.random.stateless_normal((6, 3), (1, 2))
    layers = [keras.layers.Dense(3), Counts(first, use, dtype)]
    (message,) = warned(layers, x)
    assert message.startswith("Layer 'own' ")


def test_what_rounding_leaves_is_not_found():
    def cancelled(x):
        return x - ops.matmul(x, 3.0 * ops.eye(3)) / 3.0

    assert not said(cancelled)
    x = ops.tile(tf.random.stateless_normal((1, 3), (1, 2)), (6, 1))
    layers = [
        keras.layers.Dense(3),
        keras.layers.Lambda(lambda x: x * x - x**2),
    ]
    assert not warned(layers, x)


def test_other_sizes_are_tried_again():
    def centred(x):
        return x - ops.mean(x, 0) * ops.cast(ops.shape(x)[1] > 4, x.dtype)

    layer = Own(centred, "outputs")
    layer.build((None, 4, 3))
    model = tfgpipe.GPipe([layer, keras.layers.Dense(3)], 1, 2)
    model.compile("sgd", "mse")
    x = tf.ones((6, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_on_batch(x, x)
    x = tf.ones((6, 5, 3))
    with pytest.warns(UserWarning, match="'own' mixes the rows"):
        model.train_on_batch(x, x)


class Block(keras.layers.Layer):
    """Counts the calls of all blocks."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        Block.calls += 1
        return self.dense(x)


def test_a_trial_takes_the_run_on_shapes():
    """And one more of a mini-batch, whose rows Keras would know."""

    def calls(trial, *, knows_rows):
        layers = [Block() for _ in range(3)]
        model = tfgpipe.GPipe(
            [*layers, keras.layers.Dense(2)], 1, 2, trial=trial
        )
        model.compile("sgd", "mse")
        model.build((None, 3))
        Block.calls = 0
        data = tf.data.Dataset.from_tensors((tf.ones((3,)), tf.ones((2,))))
        data = data.repeat(6).batch(6, drop_remainder=knows_rows)
        model.fit(data, shuffle=False, verbose=0)
        return Block.calls

    assert calls("warn", knows_rows=False) == 3
    assert calls("off", knows_rows=True) == 3
    assert calls("warn", knows_rows=True) == 3 + 3


def test_tensor_without_rows_has_gradients_of_all_rows():
    inputs = keras.Input((3,))
    ones = Own(lambda x: ops.ones_like(x[:1]), "outputs")(inputs)
    scaled = keras.layers.EinsumDense("ab,bc->ac", 3)(ones)
    outputs = keras.layers.Dense(3, activation="tanh")(inputs) + scaled
    model = tfgpipe.GPipe(keras.Model(inputs, outputs), 2, 2)
    model.compile("sgd", "mse")
    x = tf.random.stateless_normal((6, 3), (1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_on_batch(x, x)


class Outer(keras.layers.Layer):
    """Calls layers one after the other, and may mix rows itself."""

    def __init__(self, *layers, mixes=False, **arguments):
        super().__init__(**arguments)
        self.layers, self.mixes = list(layers), mixes

    def call(self, x):
        for layer in self.layers:
            x = layer(x)
        return x - ops.mean(x, 0) if self.mixes else x


def test_layer_inside_of_another_that_mixes_rows_is_found():
    x = tf.random.stateless_normal((6, 3), (1, 2))
    mixing = Own(MIXING["mean over rows"], "outputs")
    inner = Outer(keras.layers.Dense(3), mixing, name="inner")
    layers = [Outer(inner, keras.layers.Dense(3), name="outer")]
    (message,) = warned(layers, x)
    assert message.startswith("Layer 'outer' mixes the rows")


def test_rows_in_another_order_inside_a_layer_are_left_alone():
    """Sorted by the first number, as experts have their tokens, and back."""

    class Sorting(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="own")
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            order = ops.argsort(x[:, 0])
            y = self.dense(ops.take(x, order, axis=0))
            return ops.take(y, ops.argsort(order), axis=0)

    x = tf.random.stateless_normal((6, 3), (1, 2))
    assert not warned([Sorting()], x)


def test_layers_behind_one_that_mixes_rows_are_tried_too():
    x = tf.random.stateless_normal((6, 3), (1, 2))
    first = Outer(keras.layers.Dense(3), mixes=True, name="first")
    last = Outer(keras.layers.Dense(3), mixes=True, name="last")
    between = Outer(keras.layers.Dense(3), name="between")
    found = warned([first, between, last], x)
    assert [text.split("'")[1] for text in found] == ["first", "last"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, seed: keras.random.gamma(ops.shape(x), 2.0, seed=seed),
        lambda x, seed: ops.cast(
            keras.random.categorical(x, 1, seed=seed), x.dtype
        ),
        lambda x, seed: tf.random.stateless_uniform(tf.shape(x), seed.next()),
        lambda x, seed: tf.random.normal(tf.shape(x)),
    ],
    ids=["gamma", "categorical", "stateless", "unseeded"],
)
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.filterwarnings("ignore:.*which has side effects")
def test_layers_that_draw_are_tried(draw, mixes):
    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="own")
            self.seed = keras.random.SeedGenerator(1)

        def call(self, x):
            x = x * draw(x, self.seed)
            return x - ops.mean(x, 0) if mixes else x

    x = tf.random.stateless_normal((6, 3), (1, 2))
    texts = warned([Noise()], x, remat="never")
    texts = [text for text in texts if "side effects" not in text]
    assert len(texts) == mixes
    assert all("'own' mixes the rows" in text for text in texts)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_table_smaller_than_others_does_not_end_a_trial(is_trained):
    class Table(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="table", trainable=is_trained)
            self.table = self.add_weight((3, 4), "normal")

        def call(self, ids):
            return ops.mean(ops.take(self.table, ids, axis=0), axis=1)

    model = tfgpipe.GPipe(
        [
            keras.Input((5,), dtype="int32"),
            Table(),
            Own(MIXING["mean over rows"], "outputs"),
            keras.layers.Dense(2),
        ],
        1,
        2,
    )
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="'own' mixes the rows"):
        model.train_on_batch(tf.ones((6, 5), "int32"), tf.ones((6, 2)))


def test_what_is_refused_is_refused_again():
    model = tfgpipe.GPipe(
        [keras.layers.Lambda(MIXING["mean over rows"]), keras.layers.Dense(1)],
        1,
        2,
        trial="error",
    )
    model.compile("sgd", "mse")
    for _ in range(2):
        with pytest.raises(ValueError, match="mixes the rows"):
            model.fit(tf.ones((4, 3)), tf.ones((4, 1)), verbose=0)
    assert model.optimizer.iterations == 0


def test_rows_that_gradients_alone_mix_where_they_are_stopped_are_found():
    def mixing(x):
        mean = ops.mean(x, axis=0)
        return x + (mean - ops.stop_gradient(mean))

    def apart(x):
        return x + ops.stop_gradient(ops.round(x) - x)

    x = tf.random.stateless_normal((6, 3), (1, 2))
    for function in (mixing, apart):
        own = Own(function, "outputs")
        texts = warned([keras.layers.Dense(3), own], x)
        assert len(texts) == (function is mixing)
        assert all("to 'inputs' that mixes rows" in text for text in texts)


def stopped_mean(x):
    mean = ops.mean(x, axis=0)
    return x + (mean - ops.stop_gradient(mean))


@tf.custom_gradient
def normalised_gradient(x):
    return tf.tanh(x), lambda d: d / (1e-3 + tf.norm(d))


@pytest.mark.parametrize("function", [stopped_mean, normalised_gradient])
@pytest.mark.parametrize(
    "layer",
    [
        lambda function: keras.layers.Dense(3, function),
        keras.layers.Activation,
        keras.layers.Lambda,
        lambda function: keras.Sequential(
            [
                keras.layers.Reshape((1, 3)),
                keras.layers.LSTM(3, activation=function),
            ]
        ),
    ],
    ids=["dense", "activation", "lambda", "lstm"],
)
def test_gradients_of_functions_in_layers_are_tried_on_each_device(
    layer, function
):
    """TensorFlow wants the gradient of an operation where that is."""
    layers = [keras.Input((3,)), *(keras.layers.Dense(3) for _ in range(2))]
    layers.insert(2, layer(function))
    devices = [f"CPU:{k}" for k in range(3)]
    model = tfgpipe.GPipe(layers, 3, 2, devices=devices)
    model.compile("sgd", "mse")
    x = tf.random.stateless_normal((6, 3), (1, 2))
    with pytest.warns(
        UserWarning, match="has a gradient with respect to 'inputs'"
    ):
        model.train_on_batch(x, x)


def test_gradients_that_fail_in_a_trial_are_told_of():
    @tf.custom_gradient
    def of_three(x):
        return tf.identity(x), lambda d: tf.ensure_shape(d, (3, 4, 3))

    (text,) = said(of_three)
    assert "'own' was not tried: InvalidArgumentError" in text


def test_gradient_that_passes_a_batch_normalisation_is_no_fault_before_it():
    """Its moments follow from all rows: the paper's rule, and documented."""
    stops = Own(lambda x: x + ops.stop_gradient(ops.round(x) - x), "outputs")
    x = tf.random.stateless_normal((6, 3), (1, 2))
    first, last = keras.layers.Dense(3), keras.layers.Dense(3, "tanh")
    normal = keras.layers.BatchNormalization()
    assert not warned([first, stops, normal, last], x)


def test_layer_that_draws_in_a_loop_is_told_of():
    def drawing(x):
        def body(i, x):
            noise = tf.random.stateless_uniform(tf.shape(x), (1, 2))
            return i + 1, x + noise

        return tf.while_loop(lambda i, x: i < 2, body, (0, x))[1]

    x = tf.random.stateless_normal((6, 3), (1, 2))
    (text,) = warned([Own(drawing, "outputs"), keras.layers.Dense(3)], x)
    assert "'own' was not tried: it draws random numbers in a loop" in text


def test_gradients_are_tried_where_rows_are_folded_into_another_axis():
    @tf.custom_gradient
    def mixing(x):
        return tf.reshape(x, (-1, 3)), lambda d: tf.reshape(
            d - tf.reduce_mean(d, 0), tf.shape(x)
        )

    inputs = keras.Input((4, 3))
    folded = Own(mixing, "outputs")(inputs)
    outputs = keras.layers.Dense(3)(folded)
    split = keras.layers.Lambda(lambda x: tf.reshape(x, (-1, 4, 3)))
    outputs = split(outputs)
    model = tfgpipe.GPipe(keras.Model(inputs, outputs), 1, 2)
    model.compile("sgd", "mse")
    x = tf.random.stateless_normal((6, 4, 3), (1, 2))
    with pytest.warns(UserWarning, match="'own' has a gradient"):
        model.train_on_batch(x, x)


# Of `x.shape[0]`: of 6 rows in two micro-batches, or unknown.
ASKING = {
    "a mini-batch": (lambda n: 2.0 if n == 6 else 1.0, "for 6 rows"),
    "a micro-batch": (lambda n: 2.0 if n == 3 else 1.0, "for 3 rows"),
    "the number": (lambda n: float(n or 1), "for 3 rows"),
    "a known number": (lambda n: float(n), "was not tried: TypeError"),
    "none": (lambda n: 2.0 if n == 5 else 1.0, ""),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ASKING)
def test_code_that_asks_for_a_number_of_rows_is_found(name, training):
    """Of whichever rows, one of its numbers is not that of other rows."""
    factor, told = ASKING[name]
    layer = Own(lambda x: factor(x.shape[0]) * x, "outputs")
    layer.build((None, 4, 3))
    model = tfgpipe.GPipe(
        [keras.Input((4, 3)), layer, keras.layers.Dense(3)], 1, 2
    )
    model.compile("sgd", "mse")
    x = tf.ones((6, 4, 3))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        (model.train_on_batch if training else model.test_on_batch)(x, x)
    texts = [str(w.message) for w in found]
    assert len(texts) == bool(told)
    assert all(told in t and "pass num_micro_batches=1" in t for t in texts)


def test_functional_operations_are_named_too():
    x = keras.Input((5,))
    h = keras.layers.Dense(3)(x)
    h = h - ops.mean(h, axis=0, keepdims=True)
    model = tfgpipe.GPipe(keras.Model(x, keras.layers.Dense(2)(h)), 2, 2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="Operation 'mean.*mixes the rows"):
        model.train_on_batch(tf.ones((6, 5)), tf.ones((6, 2)))


def test_refusal_names_the_cell():
    mean = keras.layers.Lambda(MIXING["mean over rows"], name="mean")
    layers = [keras.layers.Dense(4), mean, keras.layers.Dense(1)]
    model = tfgpipe.GPipe(
        [keras.Input((3,)), *layers],
        2,
        2,
        layers_per_cell=[1, 2],
        trial="error",
    )
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'mean' of cell 1"):
        model.fit(tf.ones((4, 3)), tf.ones((4, 1)), verbose=0)
