"""Eight logical devices, seeds, and one thread an operation."""

import gc
import os
import pathlib

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import slow_tests
import tensorflow as tf
from tensorflow.python.util import tf_stack

NUM_DEVICES = 8
PLAIN = ("promises", "journeys")  # Keras is as users have it
TESTS = pathlib.Path(__file__).parent
# Whose numbers or graphs are the subject: in `make test`, TensorFlow's graph
# optimiser is on here, as it is for users. The others take a tenth less without
# it; the tools turn it off, too.
OPTIMISED = (
    "promises",
    "tfgpipe/devices",
    "tfgpipe/test_generation.py",
    "tfgpipe/run",
    "tfgpipe/state",
    "tfgpipe/test_internals.py",
)

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES,
)
for _gpu in tf.config.list_physical_devices("GPU")[:1]:  # CUDA_VISIBLE_DEVICES
    tf.config.set_logical_device_configuration(
        _gpu, [tf.config.LogicalDeviceConfiguration(900)] * NUM_DEVICES
    )
    tf.config.experimental.enable_op_determinism()


def _with_slots(make_train_function):
    """Makes what plain Keras trains with, once its optimizer has its slots.

    It creates them in the first step, and traces that step twice.
    """

    def make(self, force=False):
        optimizer = getattr(self, "optimizer", None)
        is_built = all(layer.built for layer in self._flatten_layers())
        is_ready = is_built and not tf.distribute.has_strategy()
        if is_ready and optimizer is not None and not optimizer.built:
            optimizer.build(self.trainable_variables)
        make_train_function(self, force)

    return make


def _as_it_is(make_iterator):
    """Reads datasets without a thread that tunes how.

    Who lets an iterator go waits for that thread: ten seconds, now and then.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False

    def make(dataset):
        return make_iterator(dataset.with_options(options))

    return make


_SOME_STACK = tf_stack.extract_stack()
# TensorFlow reads its lines once, and not safely where two threads do.
_SOME_STACK[0]
_PLAIN = (
    (keras.Model, "make_train_function", keras.Model.make_train_function),
    (tf.data.Dataset, "__iter__", tf.data.Dataset.__iter__),
    (tf_stack, "extract_stack", tf_stack.extract_stack),
)
_QUICKER = (
    _with_slots(keras.Model.make_train_function),
    _as_it_is(tf.data.Dataset.__iter__),
    # Where in Python each operation of a graph was made is a twentieth of the
    # time of all.
    lambda stacklevel=1: _SOME_STACK,
)
# What was imported stays: collections need not look at it every time.
gc.collect()
gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before those with a mark are left out
def pytest_collection_modifyitems(items):
    """Marks tests that take long on a machine like that of the list."""
    slow = {*slow_tests.slow_tests()}
    for item in items:
        if {item.nodeid, item.nodeid.partition("[")[0]} & slow:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before the fixtures of modules
def pytest_runtest_setup(item):
    """Turns TensorFlow's graph optimiser on or off.

    Keras and TensorFlow are as users have them where they are the reference.
    """
    is_on = item.config.option.markexpr != "not slow" or any(
        item.path.is_relative_to(TESTS / name) for name in OPTIMISED
    )
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": not is_on}
    )
    is_plain = any(item.path.is_relative_to(TESTS / name) for name in PLAIN)
    for (owner, name, plain), quicker in zip(_PLAIN, _QUICKER, strict=True):
        setattr(owner, name, plain if is_plain else quicker)


@pytest.fixture(autouse=True)
def _fresh():
    """Every test starts with the same seed and Keras's default settings."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def float64():
    """Everything in double precision."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


@pytest.fixture
def as_written():
    """TensorFlow's graph optimiser, which regroups sums, is off."""
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )


@pytest.fixture
def dense_calls(monkeypatch):
    """The dense layers that Python runs, in order, each as often."""
    calls = []
    call = keras.layers.Dense.call

    def counted(self, inputs, training=None):
        calls.append(self)
        return call(self, inputs, training=training)

    monkeypatch.setattr(keras.layers.Dense, "call", counted)
    return calls
