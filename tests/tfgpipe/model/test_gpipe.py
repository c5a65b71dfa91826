"""Everything around the step that a Keras user expects to work."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from sharing_layers import Choice
from tiny import (
    BATCH,
    ROWS,
    assert_close,
    assert_same,
    compiled,
    data,
    fit,
    layers,
    pipeline,
    sequential,
    weights,
)

import tfgpipe
from tfgpipe import internals


# ------------------------------------------------------------- what is fed
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, i):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        return tuple(a[rows] for a in data())


def generator():
    batches = Batches()
    while True:
        yield from (batches[i] for i in range(len(batches)))


class Halves(kl.Layer):
    """Shows the dtype that it gets."""

    def call(self, x):
        return keras.ops.cast(keras.ops.floor_divide(x, 2), "float32")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


@pytest.mark.parametrize(
    ("shape", "dtype", "of_data", "is_loaded"),
    [
        ((4,), "int32", lambda x: 9 * x, True),
        ((4,), "float16", lambda x: 9 * x, False),
        ((4,), "bool", lambda x: x.round(), True),
        ((4,), None, lambda x: (9 * x).astype("int64"), False),
        ((4,), None, lambda x: x[..., None], True),
        ((1,), None, lambda x: x[:, 0], False),
    ],
)
def test_input_decides_about_dtype_and_rank(
    shape, dtype, of_data, is_loaded, tmp_path
):
    def layers():
        first = [] if dtype == "bool" else [Halves()]
        return [keras.Input(shape, dtype=dtype), *first, kl.Dense(3), kl.ReLU()]

    x, y = data()
    x, y = of_data(x), np.repeat(y[:, :1], 3, axis=1)
    model, reference = pipeline(layers), compiled(sequential(layers))
    if is_loaded:
        path = str(tmp_path / "model.keras")
        model.save(path)
        model = keras.saving.load_model(path, {"Halves": Halves})
    compiled(model)
    found = model.train_on_batch(x, y)
    assert_close(found, reference.train_on_batch(x, y), tolerance=1e-5)
    expected = reference.predict_on_batch(x)
    assert_close(model.predict_on_batch(x), expected, tolerance=1e-5)
    assert_close(np.array(model(tf.constant(x))), expected, tolerance=1e-5)


@pytest.mark.usefixtures("float64")
def test_single_batches_of_any_size_give_what_keras_gives():
    def run(model):
        compiled(model, metrics=["mae"])
        found = []
        for rows in (4, 1, 4):  # 1 is fewer than M
            found.append(model.train_on_batch(*data(rows, seed=rows)))
        x, y = data(2)
        found.append(model.test_on_batch(x, y, sample_weight=np.ones(2)))
        found.append(model.predict_on_batch(x))
        return found, weights(model)

    assert_close(run(pipeline()), run(sequential()))


def test_predict_works_without_compile():
    x, _ = data()
    model = pipeline()
    assert_close(
        model.predict(x, BATCH, verbose=0), model(x).numpy(), tolerance=1e-5
    )


# ------------------------------------------------------------------ compile


def whole_loss(seen):
    """A loss and a metric that are no sums over rows."""

    def note(y, p):
        if not tf.is_symbolic_tensor(p):
            seen.append(p.numpy().shape)
        return tf.reduce_max(tf.abs(y - p))

    return {"loss": note, "metrics": [note]}


def test_run_eagerly_calls_layers_and_losses_with_real_values():
    seen, of_losses = [], []

    class Look(kl.Layer):
        def call(self, x):
            if not tf.is_symbolic_tensor(x):
                seen.append(x.numpy().shape)
            return x

    model = compiled(
        pipeline(lambda: [keras.Input((4,)), Look(), kl.Dense(2)]),
        run_eagerly=True,
        **whole_loss(of_losses),
    )
    for use in (model.train_on_batch, model.test_on_batch):
        seen.clear()
        of_losses.clear()
        use(*data(6))
        assert seen[0] == (6, 4)  # the whole mini-batch
        assert of_losses == [(6, 2)] * 2


@pytest.mark.usefixtures("float64")
def test_steps_that_are_called_give_what_keras_gives():
    x, y = data(7)
    weights_of_rows = np.linspace(0.1, 1, 7)

    def run(model):
        compiled(model, metrics=["mae"])
        logs = [
            model.train_step((x, y)),
            model.train_step((x, y, weights_of_rows)),
            model.test_step((x, y)),
        ]
        model.layers[0].trainable = False
        logs.append(model.train_step((x[:5], y[:5])))
        compiled(model, keras.optimizers.SGD(0.1))
        logs.append(model.train_step((x, y)))
        outputs = model.predict_step((x,)), model.predict_step(x)
        return [{k: float(v) for k, v in log.items()} for log in logs], [
            *map(np.asarray, outputs),
            *weights(model),
        ]

    (logs, found), (expected_logs, expected) = (
        run(pipeline()),
        run(sequential()),
    )
    assert_close(found, expected)
    for own, other in zip(logs, expected_logs, strict=True):
        assert own == pytest.approx(other)


@pytest.mark.parametrize(
    "schedule", ["gpipe", pytest.param("zero_bubble", marks=pytest.mark.slow)]
)
def test_recurrent_layers_are_compiled_where_all_is_computed_again(schedule):
    def recurrent():
        units = [kl.SimpleRNN(3, return_sequences=True), kl.GRU(3)]
        return [keras.Input((5, 4)), *units]

    x, y = np.ones((4, 5, 4), "float32"), np.ones((4, 3), "float32")
    losses = [
        compiled(model, "sgd", jit_compile=jit).train_on_batch(x, y)
        for model, jit in (
            (sequential(recurrent), False),
            (
                pipeline(recurrent, m=2, remat="always", schedule=schedule),
                True,
            ),
        )
    ]
    assert_close(losses[1], losses[0], tolerance=1e-5)


@pytest.mark.parametrize(
    ("k", "m", "remat", "layer"),
    [
        (1, 1, "except_last", lambda: kl.LSTM(3, name="r")),
        (2, 2, "never", lambda: Choice(name="r")),
    ],
)
def test_what_xla_cannot_keep_is_refused_with_the_cure(k, m, remat, layer):
    layers = [kl.Dense(4), layer(), kl.Dense(1)]
    model = tfgpipe.GPipe([keras.Input((5, 4)), *layers], k, m, remat=remat)
    compiled(model, "sgd", jit_compile=True)
    with pytest.raises(ValueError, match=r'layers \[\'r\'\].*remat="always"'):
        model.train_on_batch(np.ones((7, 5, 4)), np.ones((7, 1)))
    assert model.optimizer.iterations == 0


class Counting(tfgpipe.GPipe):
    """Counts how often its steps are traced."""

    def __init__(self, *args, **kwargs):
        self.traces = {"train": 0, "test": 0, "predict": 0}
        super().__init__(*args, **kwargs)

    def train_step(self, data):
        self.traces["train"] += 1
        return super().train_step(data)

    def test_step(self, data):
        self.traces["test"] += 1
        return super().test_step(data)

    def predict_step(self, data):
        self.traces["predict"] += 1
        return super().predict_step(data)


def test_fit_traces_the_step_once():
    x, y = data()
    model = pipeline(lambda: layers()[1:], cls=Counting)
    compiled(model, metrics=["mae"])
    fit(model, x, y, validation_data=(x[:6], y[:6]))
    fit(model, x, y, validation_data=(x[:6], y[:6]))
    assert model.traces == {"train": 1, "test": 1, "predict": 0}


def test_fit_from_a_generator_traces_once_and_loses_no_batch():
    served = []

    def counted():
        for batch in generator():
            served.append(len(batch[0]))
            yield batch

    model = compiled(pipeline(lambda: layers()[1:], cls=Counting))
    fit(model, counted(), epochs=1, steps_per_epoch=4)
    assert model.traces["train"] == 1
    assert model.optimizer.iterations == 4
    assert served[:4] == [4, 4, 4, 2]


def test_steps_that_are_called_are_traced_once():
    traced = []

    class Counted(kl.Layer):
        def call(self, x):
            traced.append(x)
            return x

    model = compiled(pipeline(lambda: [Counted(), *layers()[1:]]))
    for is_new in (True, False):
        for step in (model.train_step, model.test_step, model.predict_step):
            traced.clear()
            step(data(6))
            assert bool(traced) is is_new


# ------------------------------------------------------- losses and metrics


def overriding(base):
    """A model class that overrides what Keras lets users override."""

    class Overriding(base):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            loss = keras.ops.sqrt(keras.ops.mean((y - y_pred) ** 2))
            return loss + 0.5 * sum(self.losses) + 0.01 * keras.ops.mean(x)

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**logs, "largest": keras.ops.max(y_pred)}

    return Overriding


@pytest.mark.usefixtures("float64")
def test_overridden_loss_and_metrics_give_what_keras_gives():
    def run(model):
        compiled(model, loss=None, metrics=["mae"])
        return fit(model, *data(), validation_data=data(5)), weights(model)

    found = run(pipeline(cls=overriding(tfgpipe.GPipe)))
    keras.utils.set_random_seed(5)
    assert_close(found, run(overriding(keras.Sequential)(layers())))


def alone(base):
    """A model class whose loss looks at nothing but the outputs."""

    class Alone(base):
        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            return sum(keras.ops.mean(t**2) for t in keras.tree.flatten(y_pred))

    return Alone


def test_compiled_losses_that_are_not_called_are_not_shown():
    x = np.ones((4, 3), "float32")
    y = {"a": np.ones((4, 2)), "b": np.ones((4, 2))}

    def run(make):
        inputs = keras.Input((3,))
        outputs = {k: kl.Dense(2, name=k)(inputs) for k in "ab"}
        model = make(keras.Model(inputs, outputs))
        model.compile("sgd", {"a": "mse", "b": "mae"})
        history = model.fit(x, y, verbose=0).history
        return [*history], [*model.evaluate(x, y, return_dict=True, verbose=0)]

    plain = alone(keras.Model)
    expected = run(lambda m: plain(m.inputs, m.output))
    assert expected == (["loss"], ["loss"])
    assert run(lambda m: alone(tfgpipe.GPipe)(m, 2)) == expected


class OfLayers(tfgpipe.GPipe):
    """Takes losses from the layers."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = keras.ops.mean((y - y_pred) ** 2)
        return loss + sum(sum(layer.losses) for layer in self.layers)


def test_losses_that_single_layers_added_are_refused_in_compute_loss():
    def added():
        return [*layers()[:-1], kl.Dense(2, activity_regularizer="l2")]

    x, y = data(4)
    for make in (layers, added):
        model = compiled(pipeline(make, cls=OfLayers))
        if make is layers:  # whose regularisers have the same numbers
            model.train_on_batch(x, y)
            continue
        with pytest.raises(ValueError, match="losses of layer 'dense"):
            model.train_on_batch(x, y)


def adding(base):
    """A model class with a loss more, and a weight less that is trained."""

    class Adding(base):
        @property
        def trainable_weights(self):
            return super().trainable_weights[1:]

        @property
        def losses(self):
            kernels = [layer.kernel for layer in self.layers[:2]]
            return [*super().losses, sum(keras.ops.sum(k**2) for k in kernels)]

    return Adding


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("eagerly", [False, True])
def test_overridden_losses_and_weights_give_what_keras_gives(eagerly):
    def run(model, **modes):
        compiled(model, keras.optimizers.SGD(0.01, momentum=0.9), **modes)
        return fit(model, *data()), weights(model)

    found = run(pipeline(cls=adding(tfgpipe.GPipe)), run_eagerly=eagerly)
    keras.utils.set_random_seed(5)
    assert_close(found, run(adding(keras.Sequential)(layers())))


class Penalty(kl.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x - 1)))
        return x


def penalised():
    return [*layers(), Penalty()]


@pytest.mark.usefixtures("float64")
def test_losses_of_layers_alone_give_what_keras_gives():
    def run(model):
        model.compile(keras.optimizers.SGD(0.1))
        x, _ = data()
        return fit(model, x), model.evaluate(x, verbose=0), weights(model)

    assert_close(run(pipeline(penalised)), run(sequential(penalised)))


def message_of(run):
    with pytest.raises(ValueError) as info:  # noqa: PT011
        run()
    return str(info.value)


def test_no_loss_at_all_is_the_error_of_keras():
    def plain():
        return [keras.Input((4,)), kl.Dense(2)]

    def run(model):
        model.compile("sgd")
        return message_of(lambda: fit(model, *data()))

    expected = run(sequential(plain))
    assert "No loss to compute" in expected
    assert run(pipeline(plain, k=1)) == expected


def test_fit_without_compile_is_the_error_of_keras():
    expected = message_of(lambda: fit(sequential(), *data()))
    assert message_of(lambda: fit(pipeline(), *data())) == expected


# ------------------------------------------------------------ recompilation
@pytest.mark.usefixtures("float64")
def test_freezing_a_layer_later_gives_what_keras_gives():
    def run(model):
        compiled(model)
        history = fit(model, *data())
        model.layers[0].trainable = False
        compiled(model, keras.optimizers.SGD(0.1), loss="mae")
        frozen = model.layers[0].kernel.numpy()
        history = {**history, "frozen": fit(model, *data())["loss"]}
        assert_same([model.layers[0].kernel.numpy()], [frozen])
        return history, weights(model)

    assert_close(run(pipeline()), run(sequential()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: [kl.Flatten()],
        lambda: [kl.ReLU(), kl.Dense(4, trainable=False)],
    ],
    ids=["no weights", "frozen"],
)
def test_nothing_trainable_warns_as_keras_does(make):
    items = [keras.Input((4,)), *make()]
    model = compiled(pipeline(lambda: items, k=len(items) - 1))
    x, _ = data()
    with pytest.warns(UserWarning, match="any trainable weights"):
        loss = model.train_on_batch(x, x)
    assert loss == pytest.approx(np.mean((model.predict(x) - x) ** 2))


# ------------------------------------------------------- what it looks like
def test_layers_are_those_given_and_no_cell_shows():
    items = layers()
    model = tfgpipe.GPipe(items, 3)
    assert model.layers == items[1:]
    expected = keras.Sequential(layers())
    assert model.count_params() == expected.count_params()
    assert len(model.variables) == len(expected.variables)
    assert not [v.path for v in model.variables if "cell" in v.path]


def test_cells_before_build_is_an_error():
    model = tfgpipe.GPipe([kl.Dense(2)], 1)
    with pytest.raises(ValueError, match=r"`cells\(\)` needs a model that is"):
        model.cells()


class Inverts(kl.Layer):
    """Hands its input on, with another mask."""

    supports_masking = True

    def call(self, x):
        return x

    def compute_mask(self, x, mask=None):
        return None if mask is None else ~mask


@pytest.mark.parametrize(
    ("kind", "training"),
    [("list", None), ("sequential", True), ("functional", False)],
)
def test_call_has_the_masks_of_keras(kind, training):
    inputs = keras.Input((4,), dtype="int32")
    items = [kl.Embedding(5, 3, mask_zero=True), Inverts(), kl.LSTM(2)]
    plain = keras.Sequential([inputs, *items])
    given = {
        "list": [inputs, *items],
        "sequential": plain,
        "functional": keras.Model(plain.inputs, plain.outputs),
    }[kind]
    model = tfgpipe.GPipe(given, 2, 3)
    ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 1, 1, 1]])
    told = {} if training is None else {"training": training}
    assert_same(model(ids, **told), plain(ids, **told))
    if not training:
        assert_same(model(ids, **told), model.predict(ids, verbose=0))


class Doubles(keras.Model):
    """Trains unless it is told not to."""

    def call(self, x, training=True):
        return x * 2.0 if training else x


def test_call_of_a_model_has_the_default_of_its_own():
    plain = Doubles()
    plain(np.ones((2, 3)))
    model = tfgpipe.GPipe(plain, 1, 2)
    model.build((None, 3))
    for told in ({}, {"training": False}, {"training": True}):
        ones = np.ones((2, 3), "float32")
        assert_same(model(ones, **told), plain(ones, **told))


# ---------------------------------------------------------- mixed precision
@pytest.mark.parametrize(
    "policy",
    ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)],
)
def test_mixed_precision_is_close_to_keras(policy):
    keras.config.set_dtype_policy(policy)

    def run(model):
        compiled(model, keras.optimizers.SGD(0.05, momentum=0.9))
        assert ("LossScale" in type(model.optimizer).__name__) == (
            policy == "mixed_float16"
        )
        history = fit(model, *data(), epochs=3)
        outputs = model.predict(data()[0], verbose=0)
        assert outputs.dtype == policy.removeprefix("mixed_")
        return history["loss"], weights(model), outputs.astype("float32")

    tolerance = {"mixed_float16": 2e-3, "mixed_bfloat16": 2e-2}[policy]
    assert_close(run(pipeline()), run(sequential()), tolerance)


def test_gradients_are_added_up_in_the_dtype_asked_for():
    x = np.random.default_rng(0).standard_normal((8, 3), "float32")
    model = tfgpipe.GPipe(
        [keras.Input((3,)), kl.Dense(2, use_bias=False)],
        num_partitions=1,
        num_micro_batches=4,
        gradient_dtype="bfloat16",
    )
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = model.get_weights()[0]
    model.train_on_batch(x, x[:, :2])
    total = tf.zeros((3, 2), "bfloat16")
    for m in reversed(range(4)):
        rows = x[2 * m : 2 * m + 2]
        gradient = rows.T @ (rows @ before - rows[:, :2]) / 8
        total += tf.cast(gradient, "bfloat16")
    found = before - model.get_weights()[0]
    np.testing.assert_allclose(found, tf.cast(total, "float32"), atol=1e-6)
    exact = x.T @ (x @ before - x[:, :2]) / 8
    assert np.abs(found - exact).max() > 1e-4


@pytest.mark.filterwarnings("ignore:Even though the `tf.config.experimental")
def test_functions_that_run_eagerly_do_what_run_eagerly_does():
    def trained(run_eagerly=False):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4,)), kl.Dense(4, "tanh"), kl.Dense(2)]
        model = tfgpipe.GPipe(layers, 2, 3)
        model.compile("adam", "mse", run_eagerly=run_eagerly)
        model.fit(np.ones((5, 4)), np.ones((5, 2)), verbose=0)
        return model.get_weights()

    expected = trained(run_eagerly=True)
    tf.config.run_functions_eagerly(True)
    try:
        found = trained()
    finally:
        tf.config.run_functions_eagerly(False)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("around", "is_built"), [(keras.Sequential, False), (tfgpipe.GPipe, True)]
)
def test_pipeline_in_a_layer_is_as_sequential_there(around, is_built):
    def trained(inside, around):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4,))] * is_built + [kl.Dense(3), kl.Dense(2)]
        inner = inside(layers)
        outer = around(
            [keras.Input((5, 4)), kl.TimeDistributed(inner), kl.Dense(2)]
        )
        keras.utils.set_random_seed(2)
        outer.set_weights(
            [np.random.normal(size=w.shape) for w in outer.weights]  # noqa: NPY002
        )
        outer.compile("sgd", "mse")
        outer.fit(np.ones((2, 5, 4)), np.ones((2, 5, 2)), verbose=0)
        return outer.get_weights()

    def two(layers):
        return tfgpipe.GPipe(layers, 2)

    expected = trained(keras.Sequential, keras.Sequential)
    found = trained(two, two if around is tfgpipe.GPipe else around)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_pipeline_that_has_seen_no_data_may_be_inside_another():
    inner = tfgpipe.GPipe([kl.Dense(3), kl.Dense(2)], 2)
    outer = tfgpipe.GPipe([keras.Input((4,)), inner, kl.Dense(2)], 2)
    outer.compile("sgd", "mse")
    outer.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)
    assert inner.compute_output_shape((None, 4)) == (None, 2)
    devices = [v.value.device[-1] for v in outer.weights]
    assert devices == ["0"] * 2 + ["1"] * 4  # cut inside of it


@pytest.mark.parametrize("name", ["call", "__call__"])
def test_subclass_with_a_call_of_its_own_is_refused(name):
    """`fit` went by the layers, and only `model(x)` used it."""

    def double(self, *args, **kwargs):
        return 2 * getattr(tfgpipe.GPipe, name)(self, *args, **kwargs)

    doubled = type("Doubled", (tfgpipe.GPipe,), {name: double})
    with pytest.raises(TypeError, match=f"must not override `{name}`"):
        doubled([kl.Dense(2)], 1)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
def test_mini_batch_without_inputs_is_an_error(method):
    model = compiled(pipeline())
    with pytest.raises(ValueError, match="without any tensor"):
        getattr(model, method)([None], data()[1])


def waits(use, *args, begin="Devices wait", **kwargs):
    """What is said of devices that wait, in two uses of a model."""
    model = compiled(tfgpipe.GPipe(layers(), *args, **kwargs))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        use(model), use(model)
    messages = [str(w.message) for w in found]
    return [m for m in messages if m.startswith(begin)]


def train(model):
    model.train_on_batch(*data(4))


def evaluate(model):
    model.evaluate(*data(4), verbose=0)


def test_devices_that_wait_for_each_other_are_told_of_in_the_first_fit():
    (message,) = waits(train, 2)
    assert "Pass num_micro_batches=8" in message
    assert "or num_micro_batches=1 if it is their memory" in message


def test_devices_that_wait_are_not_told_of_where_it_is_meant():
    assert not waits(train, 2, 1)  # said so
    assert not waits(train, 1)
    assert not waits(evaluate, 2)


@pytest.fixture
def one_device(monkeypatch):
    """TensorFlow lists one."""
    listed = tf.config.list_logical_devices

    def one(kind=None):
        return listed(kind)[:1]

    monkeypatch.setattr(tf.config, "list_logical_devices", one)


def lonely(use, *args, **kwargs):
    """What is said of one device, in two uses of a model."""
    return waits(use, *args, begin="Nothing is pipelined", **kwargs)


def test_only_device_is_told_of_in_the_first_fit(one_device):
    (message,) = lonely(train, num_micro_batches=4)
    assert "'/device:CPU:0' trains all layers" in message
    assert "TensorFlow sees 0 TPUs, 0 GPUs, 1 CPUs. For GPUs" in message
    assert "Pass num_partitions=1 if you want that" in message
    assert lonely(train, 2, 4, schedule="interleaved")


def test_only_device_is_told_of_before_anything_is_traced(one_device):
    model = compiled(tfgpipe.GPipe(layers(), num_micro_batches=4))
    before = model.get_weights()
    with pytest.raises(UserWarning, match="Nothing is pipelined"):
        train(model)
    assert model.optimizer.iterations == 0
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_micro_batches", 4),
        ("schedule", "1f1b"),
        ("remat", "never"),
        ("devices", ["CPU:0", "CPU:1"]),
        ("trial", "off"),
    ],
)
def test_arguments_that_are_set_later_are_refused(name, value):
    model = tfgpipe.GPipe(layers(), 2, 2)
    message = re.escape(f"`tfgpipe.GPipe(layers, {name}={value!r}, ...)`")
    with pytest.raises(AttributeError, match=message):
        setattr(model, name, value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
    ],
)
def test_optimizer_of_another_model_brings_its_slots(make):
    model = keras.Sequential([keras.Input((4,)), kl.Dense(4), kl.Dense(2)])
    model.compile(make(), "mse")
    model.train_on_batch(*data(4))
    again = keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    again.compile(make(), "mse")
    again.optimizer.build(again.trainable_variables)
    for own, other in zip(again.optimizer.variables, model.optimizer.variables):
        own.assign(other)
    expected = [model.train_on_batch(*data(4)) for _ in range(3)]
    pipelined = tfgpipe.GPipe(again, 2, 2)
    pipelined.compile(again.optimizer, "mse")
    found = [pipelined.train_on_batch(*data(4)) for _ in range(3)]
    np.testing.assert_allclose(found, expected, 1e-5)
    kernel, *_ = again.layers[1].trainable_variables
    inner = internals.with_inner(again.optimizer)[-1]
    own = [kernel, *internals.slots(inner, kernel)]
    assert {v.value.device[-5:] for v in own} == {"CPU:1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("call", lambda x: x), ("activity_regularizer", keras.regularizers.L2())],
)
def test_what_a_pipeline_would_leave_out_cannot_be_set(name, value):
    model = tfgpipe.GPipe(layers(), 2, 2)
    with pytest.raises(AttributeError, match="Put what it does into a layer"):
        setattr(model, name, value)
