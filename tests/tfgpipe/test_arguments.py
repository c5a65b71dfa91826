"""Bad input gives an error that says what is wrong and what to do."""

import importlib
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from tiny import compiled, data, fit, layers, pipeline, sequential

import tfgpipe
from tfgpipe.schedules.orders import SCHEDULES
from tfgpipe.schedules.schedule import Schedule

ROOT = pathlib.Path(__file__).parents[3]


def dense(count=4):
    return [kl.Dense(3, name=f"layer_{i}") for i in range(count)]


def written():
    """A schedule as a user would write it."""
    return SCHEDULES["1f1b"](2, 3)


def recomputed(name):
    with keras.RematScope("full"):
        return kl.Dense(3, name=name)


def refused(*parts):
    """The error whose message has these parts, in this order."""
    return pytest.raises(
        ValueError, match=re.compile(".*".join(map(re.escape, parts)), re.S)
    )


# -------------------------------------------------------------- constructor
A = kl.Dense(3, name="a")
NORM = keras.Sequential([kl.BatchNormalization(renorm=True, name="r")])
LSTM = kl.LSTM(3, stateful=True, name="r")


@pytest.mark.parametrize(
    ("items", "parts"),
    [
        ([], ["`layers` must be a list of at least one", "layers=[]"]),
        ([*dense(), np.tanh], ["must hold Keras layers", "ufunc", "index 4"]),
        ([dense(2)], ["Keras layers or pairs (layer, cost)", "index 0"]),
        ([*dense(), keras.Input((3,))], ["after at most a `ker", "index 4"]),
        ([A, kl.ReLU(name="a")], ["must have different names", "['a']"]),
        ([(A, float("inf"))], ["`cost` of layer 'a' must be", "inf"]),
        ([NORM], ["'r' with renorm=True", "num_micro_batches=1"]),
        ([LSTM], ["'r' with stateful=True", "Make the states inputs"]),
        (
            [recomputed("r")],
            ["'r' with a `keras.Remat", "Choose `remat`"],
        ),
    ],
)
def test_layers_are_refused(items, parts):
    with refused(*parts):
        tfgpipe.GPipe(items, 1, 2)


CUT = "`layers_per_cell` must hold a number of layers, at least 1, for each of"
FEW = {"devices": ["CPU:0", "CPU:1"]}
BAD = [
    ({"schedule": "fast"}, ["`schedule` must be one of"]),
    ({"devices": "CPU:0"}, ["`devices` must be a list"]),
    ({"devices": ["XPU:1"]}, ["`devices` must be different devices", "XPU:1"]),
    ({"devices": ["CPU:1", "/cpu:1"]}, ["must be different", "'/cpu:1'"]),
    ({"remat": "no"}, ["`remat` must be one of"]),
    ({"remat": {9: "never"}}, ["from 0 to 3, to rules", "9: 'never'"]),
    ({"remat": {"layer_1": "never"}}, ["indices of cells", "'layer_1': 'nev"]),
    ({"remat_groups": 3}, ["`remat_groups` must be at most", "[1, 1, 1, 1]"]),
    ({"weights_on": "disk"}, ["`weights_on` must be 'devices', 'host'"]),
    ({"gradient_dtype": "int8"}, ["`gradient_dtype` must be one of"]),
    ({"skip_nonfinite": 1}, ["`skip_nonfinite` must be True or False"]),
    ({"skip_outliers": 3.0}, ["`skip_outliers` needs skip_nonfinite=True"]),
    ({"head_parts": 2}, ["`head_parts` must be 1 where a mini-batch is"]),
    ({"trial": "no"}, ["`trial` must be one of"]),
    ({"num_micro_batches": 0}, ["`num_micro_batches` must be an integer"]),
    ({"num_partitions": 0, **FEW}, ["`num_partitions` must be an integer"]),
    ({"num_partitions": 5}, ["number of layers, 4. Received", "=5."]),
    ({"num_partitions": None}, ["=8 (by the number of devices)"]),
    (
        {"num_partitions": 9},
        [
            "`num_partitions` must go with the devices",
            "9 cells take 9",
            "/device:CPU:7",
            "TensorFlow sees 0 TPUs, 0 GPUs, 8 CPUs. For GPUs it needs",
            "tf.config.set_logical_device_configuration",
        ],
    ),
    (FEW, ["4 cells take 4.", "devices=['CPU:0', 'CPU:1']"]),
    ({"schedule": "1f1b", **FEW}, ['under schedule="1f1b" 4 cells take 4.']),
    ({"layers_per_cell": [2, 1, 1, 1]}, [CUT, "4 cells, 4 in all", "5 in all"]),
    ({"layers_per_cell": [2, 1, 1, 0]}, [CUT, "=[2, 1, 1, 0]"]),
    ({"layers_per_cell": [2, 2]}, [CUT, "4 cells", "=[2, 2]"]),
    (
        {"num_partitions": 3, "schedule": "interleaved", **FEW},
        ["must be a multiple of 2", '="interleaved" on 2', "num_partitions=3"],
    ),
    (
        {"num_partitions": 3, "schedule": "v_min"},
        ["`num_partitions` must be a multiple of 2", "num_partitions=3"],
    ),
    (
        {"schedule": "zero_bubble_v", "devices": ["CPU:0"]},
        ['"zero_bubble_v" 4 cells take 2.', "name as many"],
    ),
    ({"schedule": "auto"}, ['`schedule="auto"` must know', "Pass costs=tfgp"]),
    (
        {"schedule": [[("forward", 0)]]},
        ["`tasks` must be one list", "('forward', 0)"],
    ),
    ({"schedule": written()}, ["must be those of `schedule`, (2, 3)"]),
    (
        {"schedule": written(), "num_partitions": 2, "num_micro_batches": 4},
        ["must be those of `schedule`, (2, 3)", "(2, 4)"],
    ),
    (
        {
            "schedule": written(),
            "num_partitions": 2,
            "num_micro_batches": 3,
            "devices": ["CPU:0"],
        },
        ["under this schedule 2 cells take 2.", "['CPU:0']"],
    ),
]


@pytest.mark.parametrize(("given", "parts"), BAD)
def test_arguments_are_checked_before_any_work(given, parts):
    layers = dense(9) if given.get("num_partitions") == 9 else dense()
    items = [keras.Input((3,)), *layers]
    with refused(*parts):
        tfgpipe.GPipe(items, **{"num_partitions": 4, **given})
    # Groups are known when the model is cut.
    assert not layers[0].built or "remat_groups" in given


def test_schedule_alone_gives_cells_and_devices():
    items = [keras.Input((3,)), *dense()]
    both = Schedule(
        [
            [("forward", 0, 0), ("forward", 1, 0)]
            + [("backward", 1, 0), ("backward", 0, 0)]
        ]
    )
    model = tfgpipe.GPipe(items, schedule=both, devices=["CPU:3"])
    assert [c.device for c in model.cells()] == ["/device:CPU:3"] * 2


def test_rules_of_remat_that_are_left_out_are_the_default():
    model = tfgpipe.GPipe(dense(), 3, remat={1: "never", np.int64(2): "always"})
    model.build((None, 3))
    rules = ["except_last", "never", "always"]
    assert model.built_for("rules").remat.rules == rules


def test_numbers_of_numpy_are_numbers():
    one, two = np.int64(1), np.int32(2)
    model = tfgpipe.GPipe(dense(3), two, two, layers_per_cell=np.array([1, 2]))
    assert model.num_partitions == 2
    assert model.num_micro_batches == 2
    assert model.get_config()["layers_per_cell"] == [1, 2]
    assert tfgpipe.GPipe(dense(), one).num_partitions == 1


# -------------------------------------------------------------------- build
def test_layer_that_cannot_take_the_one_before_is_named_by_keras():
    items = [kl.Conv2D(2, 3), kl.LSTM(3, name="sequence")]
    with refused("sequence", "expected ndim=3", "(None, 4, 4, 2)"):
        tfgpipe.GPipe([keras.Input((6, 6, 1)), *items], 1)


@pytest.mark.parametrize("value", [-1.0, float("nan"), None, "many"])
def test_cost_function_of_a_bad_value_is_named_at_build(value):
    model = tfgpipe.GPipe([(kl.Dense(3, name="a"), lambda *_: value)], 1)
    with refused("`cost` of layer 'a' must be", f"cost={value!r}"):
        model.build((None, 3))


class Late(kl.Layer):
    """Makes a batch normalisation when it is built."""

    def build(self, shape):
        self.inner = kl.BatchNormalization(renorm=True, name="late")
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def test_renorm_that_appears_at_build_is_an_error():
    with refused("layer 'late' with renorm=True"):
        tfgpipe.GPipe([keras.Input((3,)), Late()], 1, 2)


# --------------------------------------------------------------------- data
def run_batch(model, step, x, y):
    if step == "predict":
        return model.predict_on_batch(x)
    return getattr(model, f"{step}_on_batch")(x, y)


@pytest.mark.parametrize("step", ["train", "test", "predict"])
def test_batch_without_rows_is_an_error(step):
    x, y = data(0)
    with refused("`x` must have at least one row", "Drop empty"):
        run_batch(compiled(pipeline()), step, x, y)


LATER = ((0, 0), "must have at least one row")
OTHERS = ((4, 3), "`y` must have as many rows")


@pytest.mark.parametrize(
    ("step", "rows", "message"),
    [
        ("fit", *LATER),
        ("evaluate", *LATER),
        ("predict", *LATER),
        ("fit", *OTHERS),
        ("evaluate", *OTHERS),
    ],
)
def test_wrong_rows_that_are_found_later_are_an_error(step, rows, message):
    x, y = data()

    def generate():
        yield x[:4], y[:4]
        yield x[: rows[0]], y[: rows[1]]

    specs = tf.TensorSpec((None, 4)), tf.TensorSpec((None, 2))
    batches = tf.data.Dataset.from_generator(generate, output_signature=specs)
    run = getattr(compiled(pipeline()), step)
    shuffle = {"shuffle": False} if step == "fit" else {}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        run(batches, verbose=0, **shuffle)


def test_weights_of_another_length_are_an_error():
    x, y = data()
    with refused("`sample_weight` must have as many rows as `x`", "14", "5"):
        compiled(pipeline()).train_on_batch(x, y, sample_weight=np.ones(5))


def test_inputs_of_different_lengths_are_an_error():
    class Sum(kl.Layer):
        def call(self, x):
            return x[0] + x[1]

    x, y = data()
    model = compiled(tfgpipe.GPipe([Sum(), kl.Dense(2)], 2, 2))
    with refused("`x` must have as many rows", "14 rows of x and 6"):
        model.train_on_batch((x, x[:6]), y)


def of_scipy(name):
    """Makes a matrix of one of its formats, where SciPy is installed."""
    return lambda x: getattr(pytest.importorskip("scipy.sparse"), name)(x)


NOT_DENSE = {
    "sparse": (tf.sparse.from_dense, "SparseTensor", "tf.sparse.to_dense"),
    "ragged": (tf.RaggedTensor.from_tensor, "RaggedTensor", "to_tensor()"),
    "csr": (of_scipy("csr_matrix"), "SparseTensor", "matrix.toarray()"),
    "coo": (of_scipy("coo_matrix"), "SparseTensor", "matrix.toarray()"),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_sparse_and_ragged_arrays_are_errors(kind):
    make, name, cure = NOT_DENSE[kind]
    m = 1 + len(kind) % 2
    x, y = data(4)
    model = compiled(pipeline(m=m))
    for use in (
        lambda: model.fit(make(x), y, verbose=0),
        lambda: model.fit(x, y, validation_data=(make(x), y), verbose=0),
        lambda: model.evaluate(make(x), y, verbose=0),
        lambda: model.predict(make(x), verbose=0),
    ):
        with refused("`x` must hold dense tensors", f"a {name} of", cure):
            use()
    with refused("`y` must hold dense tensors", f"a {name} of", cure):
        model.fit(x, make(y), verbose=0)


def test_step_that_makes_sparse_data_dense_trains():
    class Dense(tfgpipe.GPipe):
        def train_step(self, data):
            x, y = data
            return super().train_step((tf.sparse.to_dense(x), y))

    x, y = data(4)
    model = compiled(pipeline(cls=Dense))
    model.fit(tf.sparse.from_dense(x), y, verbose=0)
    assert model.optimizer.iterations == 1


def test_data_of_unknown_rank_is_an_error():
    batches = tf.data.Dataset.from_generator(
        lambda: iter([data()]), output_types=(tf.float32, tf.float32)
    )
    with refused("unknown rank"):
        fit(compiled(pipeline()), batches)


def test_data_without_batches_is_an_error():
    batches = tf.data.Dataset.from_tensor_slices(data())
    items = layers()[1:]
    with pytest.raises(ValueError, match=r"incompatible|as many rows"):
        fit(compiled(tfgpipe.GPipe(items, 2)), batches)


def test_nan_in_the_data_shows_as_keras_shows_it():
    x, y = data()
    x[9, 1] = np.nan
    shown = []
    for model in (pipeline(), sequential()):
        compiled(model, metrics=["mae"])
        before = model.evaluate(x, y, 4, verbose=0)
        history = fit(model, x, y)
        outputs = np.isnan(model.predict(x, verbose=0))
        shown.append([np.isnan(before), history.keys(), outputs])
        assert np.isnan(history["loss"]).all()
    np.testing.assert_array_equal(shown[0][0], shown[1][0])
    np.testing.assert_array_equal(shown[0][2], shown[1][2])


# ------------------------------------------------------------------- import
def test_another_backend_of_keras_is_an_error(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError) as error:
        importlib.reload(tfgpipe)
    assert str(error.value) == (
        "tfgpipe needs Keras on TensorFlow. Received: the Keras backend 'jax'. "
        "Set the environment variable KERAS_BACKEND=tensorflow before Keras is "
        "imported."
    )


def test_import_does_not_start_the_devices():
    code = """
import tfgpipe, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 3,
)
print(len(tf.config.list_logical_devices("CPU")))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "3", result.stderr


def test_strategy_of_another_kind_around_the_model_is_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"of a `tfgpipe.PipelineStrategy`"),
    ):
        tfgpipe.GPipe([keras.layers.Dense(2)], 1)


def test_schedule_of_forward_tasks_evaluates_and_does_not_train():
    tasks = [[("forward", k, m) for m in range(2)] for k in range(2)]
    model = tfgpipe.GPipe(
        [keras.Input((2,)), kl.Dense(2), kl.Dense(2)],
        num_micro_batches=2,
        devices=["CPU:0", "CPU:1"],
        schedule=Schedule(tasks),
    )
    model.compile("sgd", "mse")
    x = np.ones((4, 2))
    plain = float(np.mean((model.predict(x, verbose=0) - x) ** 2))
    assert model.evaluate(x, x, verbose=0) == pytest.approx(plain, 1e-5)
    with pytest.raises(ValueError, match="must have backward tasks to train"):
        model.fit(x, x, verbose=0)


def test_calls_of_a_model_are_not_marked_by_a_refusal():
    """The problems of the first `GPipe` were those of all later ones."""
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Dense(2)(keras.layers.Dense(3)(x)))
    calls = tfgpipe.layers_of(model)
    with pytest.raises(ValueError, match="num_partitions=9"):
        tfgpipe.GPipe(calls, 9)
    tfgpipe.GPipe(calls, 2)
