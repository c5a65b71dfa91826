"""A test for each private name: it fails when Keras or TensorFlow moves it."""

import ast
import functools
import gc
import pathlib
import random
import re
import threading

import fabricated_tpu
import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from keras.src.saving import saving_lib
from keras.src.trainers import trainer
from keras.src.utils import model_visualization
from keras_versions import KEEPS_ORDER_OF_WEIGHTS
from tensorflow.python.ops import control_flow_util

import tfgpipe
from tfgpipe import internals


def test_deferred_variables_are_created_only_when_asked():
    layer, other = kl.Dense(3), kl.Dense(3)
    with internals.deferred_variables():
        layer.build((None, 2))
    with keras.StatelessScope():
        other.build((None, 2))  # Keras creates this one, and only this one
    assert not internals.is_created(layer.kernel)
    assert internals.is_created(other.kernel)
    with tf.device("CPU:3"):
        internals.create_variable(layer.kernel)
    assert internals.is_created(layer.kernel)
    assert layer.kernel.value.device.endswith("CPU:3")


def refused(variable):
    raise ValueError(variable.path)


def test_postponed_variables_wait_and_refuse_to_be_used():
    drawn = kl.Dense(3)
    drawn.build((None, 2))
    layer = kl.Dense(3, kernel_initializer=drawn.kernel_initializer)
    inner = kl.Dense(2)
    with internals.postponed(lambda v: v.trainable, refused):
        layer.build((None, 2))
        outer = kl.Lambda(inner)  # built inside a symbolic call
        x = keras.Input((3,))
        model = keras.Model(x, outer(x))
        frozen = keras.Variable("zeros", shape=(2,), trainable=False)
    assert model.output_shape == (None, 2) and internals.is_created(frozen)
    for variable in (layer.kernel, inner.kernel):
        assert not internals.is_created(variable)
        for use in (
            variable.numpy,
            lambda v=variable: v.assign(np.zeros(v.shape)),
            tf.function(lambda v=variable: v + 1),
        ):
            with pytest.raises(ValueError, match="kernel"):
                use()
    order = [internals.made_order(v) for v in (*layer.weights, frozen)]
    assert order == sorted({*order}, key=lambda n: (n < 0, n))
    internals.create_variable(layer.kernel)
    np.testing.assert_array_equal(layer.kernel, drawn.kernel)
    layer.kernel.assign(np.zeros((2, 3)))
    internals.start_with_zeros(inner.kernel)
    internals.create_variable(inner.kernel)
    assert not layer.kernel.numpy().any() and not inner.kernel.numpy().any()


def test_variables_are_listed_and_assigned_elsewhere():
    assigned = []
    with (
        internals.made_variables() as made,
        internals.assigning_by(lambda v, value: assigned.append((v, value))),
    ):
        layer = kl.Dense(3)
        layer.build((None, 2))
        layer.bias.assign("anything")
        with keras.StatelessScope() as scope:
            layer.bias.assign(np.ones(3))
        optimizer = keras.optimizers.SGD()  # whose variables have values
    expected = [*layer.weights, *optimizer.variables]
    assert [*map(id, made)] == [*map(id, expected)]
    assert assigned == [(layer.bias, "anything")]
    assert scope.get_current_value(layer.bias) is not None
    assert not layer.bias.numpy().any()


def test_calls_and_new_variables_are_watched():
    """By `internals.watch_calls`: so by those of the library, by homes."""
    tfgpipe.GPipe([keras.Input((2,)), kl.Dense(3)], 1, devices=["CPU:1"])
    before = keras.Operation.__call__
    tfgpipe.GPipe([keras.Input((2,)), kl.Dense(3)], 1)  # once is enough
    assert before == keras.Operation.__call__
    layer = kl.Dense(3)
    object.__setattr__(layer, "_tfgpipe_home", "CPU:2")
    y = layer(tf.ones((1, 2)))
    assert layer.kernel.value.device.endswith("CPU:2")
    assert y.device.endswith("CPU:2")
    model = keras.Sequential([layer])
    assert not trainer.model_supports_jit(model)
    with pytest.warns(UserWarning, match="Proceeding with"):
        model.jit_compile = True
    assert not model.jit_compile


def test_functions_of_a_model_are_forgotten():
    model = keras.Sequential([kl.Dense(3)])
    model.predict(np.ones((2, 2)), verbose=0)
    assert model.predict_function is not None
    internals.forget_functions(model)
    assert model.predict_function is None
    assert not hasattr(model, "generate_function")


def test_variables_are_made_in_any_trace():
    made = []

    @tf.function
    def function(x):
        with internals.outside_functions(), tf.device("CPU:2"):
            made.append(tf.Variable(1.0))
        return x + made[-1]

    for size in (1, 2):
        np.testing.assert_array_equal(function(tf.ones(size)), [2.0] * size)
    assert {v.device[-5:] for v in made} == {"CPU:2"} and len(made) >= 2


def test_tracing_for_xla_is_seen():
    seen = []

    def step():
        seen.append(internals.is_in_xla())
        with internals.in_xla():
            seen.append(internals.is_in_xla())
            graph = internals.current_graph()
            seen.append(control_flow_util.GraphOrParentsInXlaContext(graph))

    for compiled in (False, True):
        tf.function(step, jit_compile=compiled).get_concrete_function()
    assert seen[:3] == [False, True, True] and seen[-3] is True
    assert not internals.is_in_xla()


def test_initial_value_is_that_of_a_created_variable():
    layer = kl.Dense(3)
    with internals.deferred_variables():
        layer.build((None, 2))
    value = internals.initial_value(layer.kernel)
    assert not internals.is_created(layer.kernel)
    internals.create_variable(layer.kernel)
    np.testing.assert_array_equal(value, layer.kernel.numpy())


def test_moved_variable_keeps_its_value():
    variable = keras.Variable([1.0, 2.0])
    kept = variable.value
    with tf.device("CPU:2"):
        internals.move_variable(variable)
    assert variable.value is kept
    assert variable.value.device.endswith("CPU:2")
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])
    with tf.GradientTape() as tape:
        double = 2.0 * kept
    np.testing.assert_array_equal(tape.gradient(double, variable), [2.0, 2.0])
    one, other = tf.Variable([1.0]), tf.Variable([2.0])
    internals.move_storage(one, other)
    assert one.handle is other.handle


def test_storage_is_watched_as_the_variable_was_made():
    """Whatever `trainable` is when it is created, or moved."""
    with internals.deferred_variables():
        made = [kl.Dense(3), kl.BatchNormalization()]
        for layer in made:
            layer.build((None, 2))
            layer.trainable = False
    made[1].moving_mean.trainable = True
    variables = [made[0].kernel, made[1].gamma, made[1].moving_mean]
    assert [*map(internals.is_watched, variables)] == [True, True, False]
    for variable in variables:
        internals.create_variable(variable)
    for variable in variables:
        internals.move_variable(variable)
    assert [v.value.trainable for v in variables] == [True, True, False]
    assert [v.trainable for v in variables] == [False, False, True]
    assert not any(map(internals.is_trained, variables))
    made[0].trainable = True
    assert internals.is_trained(made[0].kernel)


def test_storage_knows_its_variable():
    variable, other = keras.Variable([1.0]), keras.Variable([1.0])
    internals.note_variable(variable)
    assert internals.variable_of(variable.value.handle) is variable
    assert internals.variable_of(other.value.handle) is None


def test_what_a_thread_replaces_is_as_it_was_for_others():
    """Nothing is left behind, in whichever order the threads leave."""

    class Owner:
        def method(self):
            return "method"

    before = dict(vars(Owner))
    method = internals.Replaceable(Owner, "method")
    inside, leave, seen = threading.Barrier(2), threading.Event(), []

    def first():
        seen.append(Owner().method())
        with method.by(lambda _: "first"):
            inside.wait()
            leave.wait()
            seen.append(Owner().method())

    thread = threading.Thread(target=first)
    with method.by(lambda _: "other"):
        thread.start()
        inside.wait()
        with method.by(lambda owner: f"{method.original(owner)} inside"):
            assert Owner().method() == "method inside"
        assert Owner().method() == "other"
    leave.set()
    thread.join()
    assert seen == ["method", "first"]
    assert dict(vars(Owner)) == before


def test_tapes_record_unless_they_shall_not():
    assert not internals.tapes_are_recording()
    with tf.GradientTape() as tape:
        assert internals.tapes_are_recording()
        with tape.stop_recording():
            assert not internals.tapes_are_recording()
        variable = tf.Variable(2.0)
        with internals.not_recording():
            assert not internals.tapes_are_recording()
            result = variable * 2.0
    assert tape.gradient(result, variable) is None


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_results_are_refused_to_tapes(wrap):
    def refuse(*_):
        raise ValueError("refused")

    variable = tf.Variable(2.0)

    def differentiate(source):
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = tf.constant(3.0)
            internals.refuse_tapes([result], [variable, x], refuse)
            result = result * 2.0
        return tape.gradient(result, variable if source else x)

    for source in (True, False):
        with pytest.raises(ValueError, match="refused"):
            wrap(differentiate)(source)


def test_optimizers_that_scale_the_loss_are_told_and_their_scale_is_no_slot():
    inner = keras.optimizers.Nadam()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    outer.build([keras.Variable([1.0, 2.0])])
    found = {id(v) for v in internals.slots_of_all(outer)}
    assert found == {id(v) for v in [*inner.variables, inner._u_product]}
    assert id(outer.dynamic_scale) not in found
    assert internals.scales_loss(outer)
    assert not internals.scales_loss(keras.optimizers.SGD())
    fixed = keras.optimizers.SGD(loss_scale_factor=4.0)
    assert internals.scales_loss(fixed)


def test_error_of_a_layer_keeps_its_words():
    class Fails(kl.Layer):
        def call(self, x):
            try:
                raise ValueError("mine")
            except ValueError as error:
                internals.keep_words(error)
                raise

    with pytest.raises(ValueError, match=r"^mine$"):
        Fails()(np.ones(2))


def test_read_of_losses_that_a_layer_added_is_refused():
    adds = kl.Dense(1, activity_regularizer="l2")
    model = keras.Sequential([kl.Dense(1, kernel_regularizer="l2"), adds])
    with keras.StatelessScope(collect_losses=True):
        model(np.ones((2, 2)))
    refused = []
    with internals.refusing_added_losses(
        model, lambda layer: refused.append(layer) or []
    ):
        assert len(model.layers[0].losses) == 1
        assert not refused
        assert adds.losses == []
    assert refused == [adds]
    assert "_get_own_losses" not in vars(adds)


class OwnGate(kl.Dense):
    factor = 2.0

    @property
    def gate(self):
        return 1.0


class OwnWeights(keras.losses.Loss):
    def __call__(self, *args, **kwargs):
        return 0.0


class MixedLoss(keras.losses.MeanSquaredError, OwnWeights):
    pass


def test_overridden_names_are_those_of_subclasses_and_of_the_object():
    dense = kl.Dense(1)
    assert internals.overridden(dense) == set()
    dense.call = lambda x: x
    assert internals.overridden(dense) == {"call"}
    assert internals.overridden(OwnGate(1)) == {"gate"}
    assert internals.overridden(MixedLoss()) == {"__call__"}
    model = keras.Sequential([dense])
    assert "compute_loss" not in internals.overridden(model, keras.Model)
    model.compute_loss = lambda **data: 0.0
    assert "compute_loss" in internals.overridden(model, keras.Model)


def test_what_was_added_to_a_loss_is_found_and_forgotten():
    adds = kl.Dense(1, activity_regularizer="l2")
    model = keras.Sequential([kl.Dense(1), adds])
    model(np.ones((2, 2)))
    assert internals.adding_layer(model) is adds
    assert internals.added_losses(model) == []
    model.add_loss(tf.ones([]))
    assert len(internals.added_losses(model)) == 1
    internals.forget_added_losses(model)
    assert internals.adding_layer(model) is None
    assert model.losses == []


def test_function_that_shares_tells_its_caller_what_fails():
    """Its caller also waits for another device, and would be cancelled."""

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def failing(ids):
        return tf.gather([1.0, 2.0], ids)

    def step(ids):
        with tf.device("CPU:2"):
            slow = tf.linalg.inv(tf.eye(500) * tf.cast(ids, "float32"))[0, :1]
        with tf.device("CPU:1"):
            return call([ids])[0] + slow

    internals.share_rendezvous(failing)
    concrete = failing.get_concrete_function(tf.TensorSpec([1], "int32"))
    assert concrete.function_def.attr["shared_rendezvous"].b
    call = internals.FunctionCall(concrete)
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="= 7 is not"):
            tf.function(step, autograph=False)(tf.constant([7]))


def test_input_layers_are_found():
    layer = kl.InputLayer((3,))
    inputs = keras.Input((3,))
    assert internals.input_layer(layer) is layer
    assert internals.input_layer(layer.output) is layer
    assert internals.input_layer(inputs).output is inputs
    for other in (kl.Dense(1)(inputs), keras.KerasTensor((None, 3)), kl.ReLU()):
        assert internals.input_layer(other) is None


def test_masks_travel_with_tensors():
    tensor = tf.ones([2, 3, 1])
    assert internals.get_mask(tensor) is None
    assert internals.get_mask(kl.Masking()(tensor)).shape == (2, 3)
    internals.set_mask(tensor, tf.constant([[True, True, False]] * 2))
    assert internals.get_mask(tensor).shape == (2, 3)


def compiled(**kwargs):
    model = tfgpipe.GPipe([kl.Dense(2), kl.Dense(2)], 2, 2)
    model.compile("sgd", kwargs.pop("loss", "mse"), metrics=["mae"], **kwargs)
    model.train_on_batch(np.ones((4, 2)), np.ones((4, 2)))
    return model


def test_compiled_loss_and_metrics_are_found():
    model = compiled()
    (entry,) = internals.flat_losses(internals.compiled_loss(model))
    assert entry.path == ()
    assert entry.loss_weights is None
    assert isinstance(entry.loss, keras.losses.Loss)
    metrics = internals.compiled_metrics(model).metrics
    assert [m.name for m in metrics] == ["mae"]
    assert internals.metric_function(metrics[0]).__name__ == (
        "mean_absolute_error"
    )
    assert internals.metric_function(keras.metrics.Mean()) is None
    assert internals.loss_tracker(model).name == "loss"


def test_losses_and_metrics_are_built_without_data():
    model = tfgpipe.GPipe([keras.Input((2,)), kl.Dense(2)], 1)
    model.compile("sgd", "mse", metrics=["mae"])
    spec = keras.KerasTensor((None, 2))
    assert not internals.compiled_loss(model).built
    internals.build_losses_and_metrics(model, spec, spec, spec, None)
    assert internals.compiled_loss(model).built
    assert internals.compiled_metrics(model).built


def test_overridden_loss_is_computed_with_or_without_training():
    class Plain(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None):
            return 7.0

    class Trains(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return 7.0 if training else 5.0

    one = tf.ones([2, 1])
    for model in (Plain(), Trains()):
        model.compile("sgd", "mse")
        assert (
            internals.compute_loss(model, one, one, one, None, training=True)
            == 7.0
        )


def test_dtype_of_storage_is_that_of_a_variable_whatever_a_layer_casts():
    found = []

    class Reads(keras.layers.Layer):
        def build(self, shape):
            self.own = self.add_weight((), name="own")

        def call(self, x):
            found.append((self.own.dtype, internals.stored_dtype(self.own)))
            return x

    Reads(dtype="mixed_bfloat16")(tf.ones((1, 2)))
    assert set(found) == {("bfloat16", tf.float32)}


def test_losses_are_replaced_for_a_while():
    loss = internals.compiled_loss(compiled())
    ones, zeros = np.ones((2, 2)), np.zeros((2, 2))
    with internals.replaced_losses(loss, lambda i, f: lambda *a: 7.0 + i):
        assert float(loss(ones, zeros)) == 7.0
    assert float(loss(ones, zeros)) == 1.0


def test_calls_of_metrics_are_told():
    model = keras.Model()
    model.compile(
        metrics={"a": ["mae", "mse"]}, weighted_metrics={"b": ["mae"]}
    )
    specs = [
        {name: keras.KerasTensor(shape) for name in "ab"}
        for shape in [(None, 2), (None, 2), (None,)]
    ]
    internals.build_losses_and_metrics(model, None, *specs)
    metrics = internals.compiled_metrics(model)
    known = metrics.metrics
    calls = internals.metric_calls(metrics, *specs)
    y, y_pred, weight = specs
    a, b = (y["a"], y_pred["a"], None), (y["b"], y_pred["b"], weight["b"])
    assert [call[1:] for call in calls] == [a, a, b]
    assert [call[0] for call in calls] == known == metrics.metrics


def test_arguments_of_wrapped_functions_are_found():
    loss = keras.losses.CosineSimilarity(axis=0)
    assert internals.function_arguments(loss) == {"axis": 0}
    metric = keras.metrics.CosineSimilarity(axis=0)
    assert internals.function_arguments(metric) == {"axis": 0}


def test_weights_of_a_loss_are_those_of_keras():
    values = tf.ones([2, 3])
    mask = tf.constant([[True, True, False], [True, False, False]])
    weights = internals.effective_weights(
        values,
        [[1.0] * 3, [2.0] * 3],
        mask,
        "mean_with_sample_weight",
        "float32",
    )
    np.testing.assert_array_equal(weights, [[1, 1, 0], [2, 0, 0]])
    total = internals.reduce_weighted_values(
        values, [[1.0] * 3, [2.0] * 3], mask, "sum", "float32"
    )
    assert float(total) == 4.0
    assert (
        internals.effective_weights(values, None, None, "sum", "float32")
        is None
    )


def test_moments_of_batch_normalization_are_recorded():
    layer = kl.BatchNormalization(epsilon=0.0)
    layer.build((None, 2))
    x = tf.constant([[1.0, 2.0], [3.0, 6.0]])
    seen = []

    with internals.recording_moments(lambda *a: seen.append(a)):
        layer(x, training=True)
        layer(x, training=False)
    layer(x, training=True)
    ((found, _, mask, mean, variance),) = seen
    assert found is layer
    assert mask is None
    np.testing.assert_allclose(mean, [2.0, 4.0])
    np.testing.assert_allclose(variance, [1.0, 4.0])


def test_optimizer_does_not_reduce_over_replicas_inside():
    inner = keras.optimizers.SGD()
    pairs = [(tf.ones([]), tf.Variable(1.0))]
    for optimizer in (inner, keras.optimizers.LossScaleOptimizer(inner)):
        with internals.without_all_reduce(optimizer):
            assert inner._all_reduce_sum_gradients(pairs) is pairs
        assert inner._all_reduce_sum_gradients(pairs) is not pairs
        assert "_all_reduce_sum_gradients" not in vars(inner)


def test_attributes_and_methods_are_replaced_for_a_while():
    class Own(keras.optimizers.SGD):
        @property
        def named(self):
            return self.__dict__.get("kept", "Own")

        @named.setter
        def named(self, value):
            self.__dict__["kept"] = value

    optimizer = Own()
    for thing, name, value in (
        (optimizer, "update_step", len),
        (optimizer, "momentum", 0.5),
        (optimizer, "named", "other"),
        (Own, "update_step", len),
        (Own, "named", "other"),
    ):
        before = getattr(thing, name)
        names = {*vars(thing)} - {"kept"}
        with internals.replaced(thing, name, value):
            assert getattr(thing, name) == value
        assert getattr(thing, name) == before
        assert {*vars(thing)} - {"kept"} == names


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (keras.optimizers.SGD, 0),
        (lambda: keras.optimizers.SGD(momentum=0.9, use_ema=True), 2),
        (keras.optimizers.Adam, 2),
        (lambda: keras.optimizers.Adam(amsgrad=True), 3),
        (lambda: keras.optimizers.Adam(gradient_accumulation_steps=2), 3),
        (keras.optimizers.Adafactor, 3),
        (keras.optimizers.Nadam, 2),
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_slots_of_a_variable_are_found(make, expected, number):
    variables = [keras.Variable(np.ones(i + 2)) for i in range(number)]
    optimizer = make()
    optimizer.build(variables)
    slots = [internals.slots(optimizer, v) for v in variables]
    assert [len(each) for each in slots] == [expected] * number
    assert internals.trained_by(optimizer) == variables
    found = {id(v) for each in slots for v in each}
    assert found <= {id(v) for v in optimizer.variables}
    variables[-1].overwrite_with_gradient = True  # which has none
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    assert internals.slots(optimizer, variables[-1]) == []


def test_every_call_of_an_optimizer_is_counted():
    inner = keras.optimizers.SGD(gradient_accumulation_steps=3)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    weights = [keras.Variable([1.0])]
    for optimizer in (inner, scaled):
        before = internals.raw_iterations(inner)
        if not optimizer.built:
            optimizer.build(weights)
        for _ in range(4):
            optimizer.apply([tf.constant([1.0])], weights)
        assert internals.raw_iterations(optimizer) == before + 4
    internals.lower_loss_scale(scaled)
    assert float(scaled.dynamic_scale) == 4.0
    internals.lower_loss_scale(inner)


def test_optimizers_inside_others_are_found():
    inner = keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.5
    )
    outer = keras.optimizers.LossScaleOptimizer(inner, 4.0)
    assert internals.with_inner(outer) == [outer, inner]
    assert internals.with_inner(inner) == [inner]
    model = keras.Sequential([kl.Dense(1)])
    assert internals.optimizer_names(model) == []
    model.compile(outer, "mse")
    assert internals.optimizer_names(model) == ["LossScaleOptimizer", "SGD"]


def test_unlisted_variables_are_those_that_keras_does_not_track():
    """If Keras does one day, the warning of its files can go."""
    weights = [keras.Variable([1.0, 2.0])]
    for name in ("Adam", "Nadam", "SGD", "Lion"):
        inner = getattr(keras.optimizers, name)()
        inner.build(weights)
        assert internals.unlisted(inner) == []
    inner = keras.optimizers.Nadam()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    assert internals.unlisted(outer) == []  # not built
    outer.build(weights)
    (kept,) = internals.unlisted(outer)
    assert kept is inner._u_product


@pytest.mark.parametrize("jit_compile", [None, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_call_calls_as_the_function_itself_would(jit_compile, stateful):
    count = tf.Variable(0.0)

    @tf.function(jit_compile=jit_compile, autograph=False)
    def function(x, y):
        if stateful:
            tf.raw_ops.AssignAddVariableOp(
                resource=count.handle, value=tf.constant(1.0)
            )
        return [x + y, x[:1]]

    spec = tf.TensorSpec([2])
    concrete = function.get_concrete_function(spec, spec)
    call = internals.FunctionCall(concrete)

    @tf.function(autograph=False)
    def outer(x, y):
        return call([x, y, *(t for t in concrete.captured_inputs)])

    one = tf.ones([2])
    traced = outer.get_concrete_function(one, one)
    (op,) = [o for o in traced.graph.get_operations() if "Call" in o.type]
    assert op.type == ("Stateful" if stateful else "") + "PartitionedCall"
    assert op.outputs[1].shape == (1,)
    config = tf.compat.v1.ConfigProto.FromString(op.get_attr("config_proto"))
    rewrites = config.graph_options.rewrite_options
    assert rewrites.disable_meta_optimizer
    assert ("_XlaMustCompile" in op.node_def.attr) == bool(jit_compile)
    a, b = outer(one, one)
    np.testing.assert_array_equal(a, [2, 2])
    np.testing.assert_array_equal(b, [1])
    assert float(count) == stateful


def test_function_that_only_a_name_calls_is_kept():
    """TensorFlow would forget it, and fail at run time."""

    def nested():
        inner = tf.function(lambda x: x + 1.0, autograph=False)
        concrete = inner.get_concrete_function(tf.TensorSpec([1]))
        call = internals.FunctionCall(concrete)
        outer = tf.function(lambda x: call([x]), autograph=False)
        found = outer.get_concrete_function(tf.TensorSpec([1]))
        internals.keep(found, concrete)
        return found

    function = nested()
    gc.collect()
    np.testing.assert_array_equal(function(tf.ones([1]))[0], [2.0])


def test_analysis_stops_at_a_variable_of_the_old_kind():
    """It is there, needs no value, and what comes after it runs."""

    @tf.function(autograph=False)
    def function(x):
        op = internals.analysis_stopper()
        assert op.type == "VariableV2"
        with tf.control_dependencies([op]):
            return x + 1.0

    assert float(function(tf.ones([]))) == 2.0


def test_independent_operations_are_not_ordered():
    @tf.function
    def function():
        for i in range(3):
            tf.print(i)
            if i == 1:
                graph = tf.compat.v1.get_default_graph()
                internals.run_independently(graph.get_operations()[-1])

    graph = function.get_concrete_function().graph
    first, second, third = (
        op for op in graph.get_operations() if op.type == "PrintV2"
    )
    assert first in third.control_inputs
    assert second not in third.control_inputs


def test_calls_are_ordered_by_what_they_assign_alone():
    variable = tf.Variable(1.0)

    @tf.function
    def function():
        for i in range(3):
            called = tf.function(
                (lambda: variable.assign_add(1.0))
                if i == 1
                else (lambda: variable + 1.0)
            ).get_concrete_function()
            call = internals.FunctionCall(called)
            call([*called.captured_inputs])
            graph = tf.compat.v1.get_default_graph()
            internals.run_independently(graph.get_operations()[-1])

    graph = function.get_concrete_function().graph
    reads, assigns, last = (
        op for op in graph.get_operations() if "Call" in op.type
    )
    assert [*assigns.control_inputs] == [reads]
    assert [*last.control_inputs] == [assigns]


@pytest.mark.parametrize("assigns", [False, True])
def test_resources_that_are_only_read_are_told(assigns):
    variable = tf.Variable(1.0)

    @tf.function
    def function(n):
        for _ in tf.range(n):  # a loop, which takes the resource
            tf.print(variable)
            if assigns:
                variable.assign_add(1.0)
        return variable.read_value()

    graph = function.get_concrete_function(tf.TensorSpec([], tf.int32)).graph
    ((_, handle),) = [
        pair for pair in graph.captures if pair[1].dtype == tf.resource
    ]
    assert internals.is_only_read(handle) != assigns


def test_all_layers_inside_a_layer_are_found():
    inner = kl.Dense(2)
    outer = keras.Sequential([keras.Sequential([inner])])
    assert inner in internals.flat_layers(outer)
    assert outer in internals.flat_layers(outer)


def test_remat_scope_of_a_layer_is_told():
    plain = kl.Dense(2)
    with keras.RematScope(mode="full"):
        scoped = kl.Dense(2)
    assert internals.remat_mode(plain) is None
    assert internals.remat_mode(scoped) is not None


def test_what_keras_defines_is_told():
    """Not what wraps something of Keras, which has its name and module."""
    plain = keras.losses.mean_squared_error
    wrapped = functools.wraps(plain)(lambda y, y_pred: plain(y, y_pred))

    @functools.wraps(kl.Dense, updated=())
    class Wrapped(kl.Dense):
        pass

    assert Wrapped.__module__ == kl.Dense.__module__
    for thing in (kl.Dense, kl.Dense(1), plain):
        assert internals.is_keras(thing)
    assert internals.is_keras_function(plain)
    for thing in (tfgpipe.GPipe, Wrapped, Wrapped(1), wrapped, len):
        assert not internals.is_keras(thing)
        assert not internals.is_keras_function(thing)


def test_kinds_of_operations_are_told():
    effects = {"PrintV2": True, "MatMul": False, "No": False}
    assert {kind: internals.is_stateful(kind) for kind in effects} == effects
    calls = {"While": True, "Case": True, "MatMul": False}
    assert {kind: internals.takes_functions(kind) for kind in calls} == calls


def test_graph_of_a_called_function_is_found():
    inner = tf.function(lambda x: tf.cos(x), autograph=False)

    @tf.function
    def outer(x):
        return inner(x)

    graph = outer.get_concrete_function(tf.TensorSpec([1])).graph
    (call,) = [op for op in graph.get_operations() if "Call" in op.type]
    called = internals.function_graph(call, call.get_attr("f").name)
    assert "Cos" in [op.type for op in called.get_operations()]
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(graph.as_graph_def(), name="")
    call = imported.get_operation_by_name(call.name)
    called = internals.function_graph(call, call.get_attr("f").name)
    assert "Cos" in [op.type for op in called.get_operations()]


def test_strategy_of_one_replica_is_current_in_its_scope_only():
    strategy = internals.SingleReplicaStrategy()
    with strategy.scope() as entered, strategy.scope():
        assert tf.distribute.get_strategy() is strategy is entered
        assert tf.distribute.in_cross_replica_context()
        with internals.without_strategy():
            assert not tf.distribute.has_strategy()
            assert not tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_strategy() is strategy
    assert not tf.distribute.has_strategy()
    assert strategy.num_replicas_in_sync == 1
    with (
        tf.distribute.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(
            RuntimeError, match="must not be entered in the scope of another"
        ),
        strategy.scope(),
    ):
        pass


def test_strategy_of_one_replica_runs_a_function_once_and_without_it():
    strategy = internals.SingleReplicaStrategy()

    @tf.function
    def step(x):
        assert not tf.distribute.has_strategy()
        return 2 * x

    assert strategy.run(step, args=(tf.constant(3),)) == 6
    rows = tf.data.Dataset.range(4).batch(4)
    (batch,) = strategy.experimental_distribute_dataset(rows)
    assert batch.shape == (4,)
    with strategy.scope(), tf.device("CPU:3"):
        variable = tf.Variable(1.0)  # as any other
    with strategy.extended.colocate_vars_with(variable):
        slot = tf.Variable(2.0)
    assert slot.device == variable.device and slot.device.endswith("CPU:3")
    strategy.extended.update(variable, lambda v: v.assign(5.0))
    assert variable.numpy() == 5


def test_optimizer_made_elsewhere_is_adopted():
    strategy = internals.SingleReplicaStrategy()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, use_ema=True)
    )
    internals.adopt(optimizer, strategy)
    weight = keras.Variable(1.0)
    with strategy.scope():
        optimizer.build([weight])
        strategy.run(lambda: optimizer.apply([tf.constant(2.0**15)]))
        optimizer.finalize_variable_values([weight])
    assert weight.numpy() < 1


def test_strategy_of_a_tpu_has_the_assignment_it_was_made_with(monkeypatch):
    fabricated_tpu.list_cores(monkeypatch)
    topology = fabricated_tpu.TPUS["v2-8"]
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        topology, num_replicas=8
    )
    for given in (None, assignment):
        strategy = fabricated_tpu.tensorflows_strategy(given)
        assert internals.device_assignment(strategy) is given


def test_variables_say_another_shape_inside_alone():
    variable = keras.Variable(np.zeros((4, 6)))
    with internals.of_shape(variable, [4, 3]):
        assert variable.shape == (4, 3)
    assert variable.shape == (4, 6)


def test_every_function_has_a_test():
    """Each is named here, or used by what is; private attributes, too."""
    modules = pathlib.Path(internals.__file__).parent.glob("*.py")
    names = set()
    for node in (n for m in modules for n in ast.parse(m.read_text()).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {*re.findall(r"\w+", ast.unparse(node.targets[0]))}
    names = {name for name in names if not re.match("_|[A-Z_]+$", name)}
    text = pathlib.Path(__file__).read_text()
    indirectly = {"BuiltBeforeTracing", "Nest", "seed_generator_kept"}
    missing = {
        name
        for name in names - indirectly
        if not re.search(rf"internals\.{name}\b", text)
    }
    assert len(names) > 50
    assert not missing


def test_functions_are_traced_anew_inside_and_not_outside():
    value = tf.constant(1.0)
    function = tf.function(lambda: value + 1)
    assert function() == 2
    value = tf.constant(2.0)
    with internals.tracing_anew():
        assert function() == 3
        value = tf.constant(3.0)
        assert function() == 3  # once inside
    assert function() == 2


def test_tapes_record_outside_of_functions():
    x = tf.Variable(2.0)
    with internals.outside_functions(), tf.GradientTape() as tape:
        y = x * x
    assert tape.gradient(y, x) == 4
    made, traces = [], []

    @tf.function
    def function():
        traces.append(1)
        with internals.outside_functions():
            if not made:  # no affair of the function's
                made.append(tf.Variable(2.0))
            with internals.recording(), tf.GradientTape() as tape:
                y = made[0] * made[0]
            assert tape.gradient(y, made[0]) == 4
            assert tf.executing_eagerly()
        return made[0] + 1

    assert function() == function() == 3
    assert len(traces) == 1  # TensorFlow looks again what has made some


def test_model_that_holds_has_its_layers_first_in_files(tmp_path):
    class Model(internals.HoldingModel):
        def __init__(self):
            super().__init__()
            self.z_dense = kl.Dense(1)

        @property
        def layers(self):
            return [self.z_dense]

        def call(self, x):
            return self.z_dense(x)

    model = Model()
    model(np.ones((1, 2)))
    model.a_dense = model.z_dense  # no error: it is built
    model.save_weights(tmp_path / "held.weights.h5")
    with h5py.File(tmp_path / "held.weights.h5") as file:
        assert "layers" in file
        assert "a_dense" not in file


def test_variables_of_a_model_are_called_after_another_one():
    class Model(internals.HoldingModel):
        other = None

        def build(self, input_shape):
            self.inner = kl.Dense(1, name="inner")
            self.inner.build((None, 2))

        def _named_after(self):
            return self.other

    model = Model(name="one")
    model.build(None)
    assert model.inner.kernel.path == "one/inner/kernel"
    named = Model(name="one")
    named.other = keras.Sequential(name="another")
    named.build(None)
    assert named.inner.kernel.path == "another/inner/kernel"


def test_files_hold_what_is_said_of_a_class(tmp_path, monkeypatch):
    monkeypatch.setattr(saving_lib, "_walk_saveable", saving_lib._walk_saveable)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = kl.Dense(1)
            self.w = self.add_weight(name="w")

        def call(self, x):
            return self.inner(x)

    class Other(Model):
        pass

    def parts(model):
        for name, part in internals.saved_parts(model):
            yield ("named" if name == "inner" else name), part

    internals.save_by(Other, parts)
    for cls, name in (Model, "inner"), (Other, "named"):
        model = cls()
        model(np.ones((1, 2)))
        model.save_weights(tmp_path / "m.weights.h5")
        with h5py.File(tmp_path / "m.weights.h5") as file:
            assert f"{name}/vars/0" in file
            assert "0" in file["vars"]
        model.load_weights(tmp_path / "m.weights.h5")


def test_weights_of_a_layer_itself_are_told_from_those_inside():
    model = keras.Sequential([kl.Dense(1)])
    assert not internals.has_all_weights(model)
    model.layers[0].build((None, 2))
    assert internals.has_all_weights(model) and not model.built
    assert internals.direct_variables(model) == []
    norm = kl.BatchNormalization()
    norm.build((None, 2))
    assert internals.direct_variables(norm) == norm.weights


def test_xla_takes_models_of_layers_that_it_takes():
    model = keras.Sequential([kl.Dense(1)])
    model.supports_jit = False
    assert internals.supports_jit(model)
    model.layers[0].supports_jit = False
    assert not internals.supports_jit(model)
    assert model.supports_jit is False


# ------------------------------------------- graphs and functions in layers
def test_graphs_of_branches_and_loops_are_told_from_those_of_functions():
    found = {}

    def note(name, value=0):
        found[name] = internals.in_control_flow(
            internals.current_graph(), outside
        )
        return value

    @tf.function
    def step(x):
        nonlocal outside
        outside = internals.current_graph()
        note("direct")
        tf.cond(x > 0, lambda: note("branch"), lambda: 0)
        tf.while_loop(lambda i: i < x, lambda i: note("loop", i + 1), [0])
        tf.function(lambda: note("function"))()
        tf.cond(x > 0, tf.function(lambda: note("inside")), lambda: 0)
        return x

    outside = None
    step(tf.constant(1))
    assert found == {
        "direct": False,
        "branch": True,
        "loop": True,
        "function": False,
        "inside": True,
    }
    assert internals.current_graph() is None
    assert internals.graph_of(tf.ones(1)) is None
    assert internals.is_eager(tf.ones(1)) and not internals.is_eager([])


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_functions_with_gradients_of_their_own_are_noticed(wrap):
    found = {}

    class Variable:
        def __tf_tensor__(self, dtype=None, name=None):
            return read("argument")

    variable = Variable()

    def read(name):
        found[name] = internals.in_custom_gradient(variable)
        return tf.ones(2)

    @tf.custom_gradient
    def custom(x):
        return tf.convert_to_tensor(x) + read("custom"), lambda dy: dy

    @tf.recompute_grad
    def again(x):
        return x * read("again")

    @tf.custom_gradient
    def taking(x):
        return tf.convert_to_tensor(x) * 2.0, lambda dy: dy

    def run():
        return custom(read("outside")) + again(tf.ones(2)) + taking(variable)

    wrap(run)()
    assert found == {
        "outside": False,
        "custom": True,
        "again": True,
        "argument": False,
    }


def test_tensors_of_graphs_that_are_not_around_are_told():
    kept, found = [], []

    @tf.function(autograph=False)
    def step(x):
        tf.function(lambda: kept.append(x + 1))()

        def inner():
            return kept[0] + x + variable

        graph = tf.function(inner).get_concrete_function().graph
        found.extend(internals.captures_of_strangers(graph))

    variable = tf.Variable(1.0)
    step(tf.constant(1.0))
    assert len(found) == 1 and found[0] is kept[0]


def test_symbolic_calls_of_a_layer_are_known():
    inputs = keras.Input((2,))
    dense, other = kl.Dense(2), kl.Dense(2)
    with internals.in_no_graph([dense]):
        dense(inputs)
    assert internals.symbolic_calls(dense) == []
    assert internals.calls_on(internals.producer(inputs)) == []
    outputs = other(dense(inputs) + inputs)
    (call,) = internals.symbolic_calls(dense)
    assert isinstance(call, internals.SymbolicCall)
    assert call.inputs == [inputs]
    (add,) = internals.calls_on(dense)
    assert add.inputs[0] is call.outputs[0]
    assert not isinstance(add.operation, kl.Layer)
    assert internals.producer(outputs) is other
    assert internals.producer(keras.KerasTensor((None, 2))) is None


def test_losses_are_noted_by_the_layers_that_added_them():
    class Adds(kl.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    ours, other = Adds(), Adds()
    with (
        keras.StatelessScope(collect_losses=True) as scope,
        internals.noting_losses([keras.Sequential([ours])]) as added,
    ):
        other(ours(tf.ones(3)))
    assert len(scope.losses) == 2
    assert added(scope.losses) == scope.losses[:1]


def test_masks_that_keras_found_are_no_inputs_of_a_call():
    x = keras.Input((4,), dtype="int32")
    h = kl.Embedding(5, 3, mask_zero=True)(x)
    found, given = kl.GRU(3), kl.GRU(3)
    mask = x > 1
    found(h), given(h, mask=mask)
    assert internals.symbolic_calls(found)[0].inputs == [h]
    assert internals.symbolic_calls(given)[0].inputs == [h, mask]


def test_names_are_as_if_nothing_was_made_inside():
    with internals.names_kept():
        names = [kl.Dense(2).name for _ in range(2)]
    assert kl.Dense(2).name == names[0] != names[1]


def test_losses_of_a_scope_are_forgotten():
    layer = kl.ActivityRegularization(0.1)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(keras.ops.ones((2, 2)))
        (loss,) = scope.losses
    internals.forget_losses(layer)
    assert not layer._loss_ids and not layer._losses
    assert float(loss) > 0


def test_variables_are_known_to_be_deferred():
    assert not internals.variables_are_deferred()
    with internals.deferred_variables():
        assert internals.variables_are_deferred()
        dense = kl.Dense(2)
        dense.build((None, 2))
        assert internals.storage(dense.kernel) is None
        keras.random.normal((2,))  # whose generator has no value here
    internals.create_variable(dense.kernel)
    assert internals.storage(dense.kernel) is dense.kernel.value
    a, b = keras.random.normal((2,)), keras.random.normal((2,))
    assert not np.array_equal(a, b)


class FunctionalSubclass(keras.Model):
    def __init__(self, x, y):
        super().__init__(inputs=x, outputs=y)


class OwnCall(FunctionalSubclass):
    def call(self, x, training=None):
        return super().call(x, training=training) + 1


def test_functional_models_are_told_from_those_with_a_call_of_their_own():
    x = keras.Input((2,))
    y = kl.Dense(1)(x)
    assert internals.is_functional(keras.Model(x, y))
    assert internals.is_functional(FunctionalSubclass(x, y))
    assert not internals.is_functional(OwnCall(x, y))
    assert not internals.is_functional(keras.Sequential([x, kl.Dense(1)]))


def test_private_methods_of_steps_are_there():
    x = keras.Input((2,))
    model = keras.Model(x, kl.Dense(1)(x))
    for name in internals.METHODS_OF_STEPS:
        assert callable(getattr(model, name))


def test_functional_model_of_a_sequential_is_found():
    model = keras.Sequential([kl.Dense(1)])
    assert internals.functional_of(model) is None
    model.build((None, 2))
    assert internals.is_functional(internals.functional_of(model))

    class Other(keras.Sequential):
        def call(self, x):
            return x

    other = Other([keras.Input((2,))])
    assert internals.functional_of(other) is None
    assert internals.runs_its_layers(model)
    assert not internals.runs_its_layers(other)
    model.activity_regularizer = keras.regularizers.L2(0.1)
    assert not internals.runs_its_layers(model)


def test_calls_of_a_graph_come_in_an_order_that_can_be_run():
    x = keras.Input((2,))
    dense = kl.Dense(2)
    h = dense(x)
    y = kl.Add()([dense(h), h * 2.0])
    calls = internals.graph_calls(keras.Model(x, y))
    assert all(isinstance(call, internals.SymbolicCall) for call in calls)
    assert [call.operation for call in calls].count(dense) == 2
    known = {id(x)}
    for call in calls:
        tensors = [t for t in call.inputs if isinstance(t, keras.KerasTensor)]
        assert tensors and known.issuperset(map(id, tensors))
        known.update(map(id, call.outputs))
    assert id(y) in known


def test_layers_are_found_in_the_order_of_the_weights():
    x = keras.Input((2,))
    second = kl.Dense(2)
    model = OwnLayers(x, kl.Dense(3), second)
    found = [w for la in internals.direct_layers(model) for w in la.weights]
    assert [*map(id, found)] == [*map(id, model.weights)]
    if KEEPS_ORDER_OF_WEIGHTS:
        assert internals.direct_layers(model)[0] is second
    assert model.layers[1] is not second


class OwnLayers(keras.Model):
    """Tracks its second layer before it is a functional model."""

    def __init__(self, x, first, second):
        self.second = second
        super().__init__(inputs=x, outputs=second(first(x)))


def test_random_numbers_are_those_that_would_have_been_drawn():
    def drawn():
        return (
            random.random(),
            np.random.random(),  # noqa: NPY002
            float(keras.random.uniform(())),
        )

    assert not internals.global_seed()
    keras.utils.set_random_seed(3)
    with internals.random_state_kept():
        inside = drawn()
    assert drawn() == inside
    (state,) = internals.global_seed()
    assert state.shape == (2,)
    own = tf.random.Generator.from_seed(1)
    before = tf.random.get_global_generator()
    tf.random.set_global_generator(own)
    tf.random.set_seed(3)
    expected = tf.random.uniform([2])
    tf.random.set_seed(3)
    numbers = own.state.numpy()
    with internals.random_numbers_kept():
        tf.random.uniform([2])
        own.normal([2])
    np.testing.assert_array_equal(tf.random.uniform([2]), expected)
    np.testing.assert_array_equal(own.state.numpy(), numbers)
    tf.random.set_global_generator(before)


def test_first_data_are_what_fit_was_given(monkeypatch):
    found, specs = [], []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def noted(iterator=None, data_batch=None):
        found.append(internals.first_data(iterator))
        specs.append(iterator._get_iterator().element_spec)

    monkeypatch.setattr(model, "_maybe_symbolic_build", noted)
    x, y = np.ones((6, 2)), np.ones((6, 1))
    model.fit(x, y, verbose=0)
    batches = ((x[:2], y[:2]) for _ in "ab")
    model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)
    dataset = tf.data.Dataset.from_tensors((x, y))
    model.fit(dataset, shuffle=False, verbose=0)
    arrays, batch, nothing = found
    np.testing.assert_array_equal(arrays[0], x)
    np.testing.assert_array_equal(batch[0], x[:2])
    assert nothing is None
    assert specs[2][0] == tf.TensorSpec([6, 2], x.dtype)


def test_model_is_drawn_as_another_one(monkeypatch):
    for module in (keras.utils, model_visualization):
        monkeypatch.setattr(module, "model_to_dot", lambda model: model)

    class Own:
        pass

    internals.draw_as(Own, lambda own: "another")
    for module in (keras.utils, model_visualization):
        assert module.model_to_dot(Own()) == "another"
        assert module.model_to_dot(3) == 3


def test_what_tapes_add_to_a_graph_is_noted_by_operations():
    """Also where a gradient needs nothing of its operation, as of a bias."""

    @tf.custom_gradient
    def own(x):
        return tf.sin(x), lambda dy: dy * tf.cos(x)

    made, found, added = {}, [], []

    @tf.function(autograph=False)
    def step(x):
        graph = internals.current_graph()
        with (
            tf.GradientTape(persistent=True) as tape,
            internals.naming_on_tapes(),
        ):
            tape.watch(x)
            made["BiasAdd"] = tf.nn.bias_add(x, tf.ones(2))
            made["Neg"] = -made["BiasAdd"]
            made["own"] = own(made["Neg"])
            y = made["Tanh"] = tf.tanh(made["own"])
        with internals.noting_gradients(tf.Graph()) as notes:
            tape.gradient(y, x)
        assert notes == []  # of another graph
        with internals.noting_gradients(graph) as notes:
            d = tape.gradient(y, x)
        found.extend(notes)
        operations = graph.get_operations()
        added.extend(
            [o.type for o in operations[start:end]] for _, start, end in notes
        )
        return d

    x = tf.ones((1, 2))
    gradient = step(x)
    names = [made[key].op.name for key in ("Tanh", "own", "Neg", "BiasAdd")]
    assert [note[0] for note in found if note[0] in names] == names
    kinds = [own for note, own in zip(found, added) if note[0] in names]
    assert kinds == [["TanhGrad"], ["Cos", "Mul"], ["Neg"], ["BiasAddGrad"]]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(tf.sin(-(x + 1)))
    np.testing.assert_allclose(gradient, tape.gradient(y, x), 1e-6)


def test_calls_of_layers_are_made_by_a_function():
    dense = kl.Dense(2)
    model = keras.Sequential([dense])
    calls = []

    def called(layer, run):
        calls.append(layer)
        return 2.0 * run() if layer is dense else run()

    x = np.ones((1, 3), "float32")
    expected = model(x)
    with internals.around_calls(called):
        found = model(x)
    assert calls[0] is model and calls[-1] is dense
    np.testing.assert_array_equal(found, 2.0 * expected)
    np.testing.assert_array_equal(model(x), expected)


def test_what_keras_hangs_on_tensors_is_found_and_hung_on_others():
    found = []
    embedding = kl.Embedding(5, 2, mask_zero=True)
    embedding.build()

    @tf.function(autograph=False)
    def step(ids):
        masked = embedding(ids)
        chances = keras.ops.softmax(masked[:, 0])
        for tensor in (masked, chances, ids):
            found.append(internals.attached_to(tensor))
        new = tf.identity(masked)
        assert internals.attached_to(new) == {}
        assert internals.attach(new, found[0]) is new
        assert internals.get_mask(new) is found[0]["_keras_mask"]
        logits = masked[:, 1]
        by_operation = internals.attached_to(tf.nn.softmax(logits))
        assert by_operation["Softmax"] is logits
        made = internals.attach(new, by_operation)
        assert made.op.type == "Softmax" and made.op.inputs[0] is logits
        return new

    step(tf.constant([[1, 0]]))
    of_mask, of_logits, of_nothing = found
    assert of_mask.get("_keras_mask").dtype == tf.bool
    assert len(of_mask) == len(of_logits) == 1
    assert of_logits.get("_keras_mask") is None
    assert of_nothing == {}


def test_copies_have_what_hangs_on_a_tensor():
    @tf.function
    def run(x):
        x.note, x._keras_mask = "a user's", x > 0
        one, other = internals.copies_of(x, 2, lambda a, b: a - b)
        for copy in (one, other, *internals.copies_of(x, 1)):
            assert copy is not x
            assert copy.note == x.note
            assert internals.get_mask(copy) is internals.get_mask(x)
        (d,) = tf.gradients(3.0 * one + other, x)
        return d

    np.testing.assert_array_equal(run(tf.ones([2])), [2.0, 2.0])
    eager = tf.ones([2])
    internals.set_mask(eager, eager > 0)
    (copy,) = internals.copies_of(eager, 1)
    assert internals.get_mask(copy) is internals.get_mask(eager)


def test_what_a_user_hangs_on_tensors_is_found():
    found = []

    @tf.function(autograph=False)
    def step(x):
        x.rows, x._number, x._keras_mask = tf.tanh(x), 3, None
        found.extend(internals.hung_by_user(x))

    step(tf.ones((4, 2)))
    assert found == ["rows", "_number"]
    assert internals.hung_by_user(tf.ones(2)) == {}


def test_arguments_of_compile_are_kept_until_the_next():
    model = keras.Sequential([kl.Dense(1)])
    model.compile("sgd", "mse")
    arguments = internals.compile_arguments(model)
    assert arguments["loss"] == "mse"
    assert internals.compile_arguments(model) is arguments
    model.compile("sgd", "mae")
    assert internals.compile_arguments(model) is not arguments


def test_model_says_whether_it_takes_training():
    class Own(keras.Model):
        def call(self, x):
            return x

    assert not internals.takes_training(Own())
    assert internals.takes_training(keras.Sequential([kl.Dense(1)]))


def test_metrics_of_a_model_are_its_own_and_those_of_layers():
    class Own(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = kl.Dense(1)
            self.inner.seen = keras.metrics.Mean(name="of the layer")
            self.held = keras.metrics.Mean(name="held")

    model = Own()
    model.compile("sgd", "mse", metrics=["mae"])
    assert internals.held_metrics(model) == [model.held]
    own = internals.own_metrics(model)
    assert model.metrics == [*own, model.inner.seen] and own[-1] is model.held


def test_seeds_are_the_variables_that_are_no_weights():
    dropout, norm = kl.Dropout(0.5), kl.BatchNormalization()
    norm.build((None, 2))
    (seed,) = internals.seeds_of([dropout, norm, dropout])
    assert seed is dropout.seed_generator.state


def test_function_of_a_graph_takes_any_of_its_tensors():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder("float32", (None,))
        h = tf.nn.relu(x)
        y = h + tf.random.uniform(())
        z = tf.cond(tf.reduce_sum(h) > 1, lambda: h, lambda: 2.0 * h)
    whole = internals.GraphFunction(graph, [x], [y, z])
    made = whole([tf.constant([1.0, -1.0, 2.0])])
    assert made[1].numpy().tolist() == [1, 0, 2]
    rest = internals.GraphFunction(graph, [h], [z])
    assert rest([tf.constant([0.5])])[0].numpy().tolist() == [1]


def test_graphs_are_imported_without_a_look_for_neighbours():
    """TensorFlow's own import looks for those of every operation."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder("float32", (None,), "x")
        tf.add(x, tf.nn.relu(x), name="y")
    looked_for = []
    importer = internals.tensorflow._importer
    found = importer._GetColocationNames

    def look(op):
        looked_for.append(op.name)
        return found(op)

    importer._GetColocationNames = look
    try:

        @tf.function
        def run(x):
            definition = graph.as_graph_def()
            return internals.import_definition(definition, {"x": x}, ["y:0"])

        (y,) = run(tf.constant([-1.0, 2.0]))
        tf.function(
            lambda x: tf.graph_util.import_graph_def(
                graph.as_graph_def(), {"x": x}, ["y:0"]
            )
        )(tf.constant([1.0]))
    finally:
        importer._GetColocationNames = found
    assert y.numpy().tolist() == [-1, 4]
    assert {name.split("/")[0] for name in looked_for} == {"import"}


def test_operations_of_a_graph_are_put_on_devices():
    with tf.Graph().as_default():
        op = tf.ones(3).op
    internals.put_on(op, "/device:CPU:1")
    assert op.device == "/device:CPU:1"


# ------------------------------------------------------------------------- XLA
def test_xla_says_what_it_cannot_translate_and_what_it_has_no_kernel_for():
    spec = tf.TensorSpec((2, 3), "float32")
    assert internals.xla_refusal(lambda x: tf.tanh(x), [spec]) is None
    by_value = internals.xla_refusal(
        lambda x: tf.range(tf.cast(tf.reduce_max(x), "int32")), [spec]
    )
    assert "node `range` with op Range" in by_value
    unfit = internals.xla_refusal(lambda x: tf.ensure_shape(x, (1,)), [spec])
    assert unfit is None
    assert internals.has_xla_kernel("MatMul")
    assert not internals.has_xla_kernel("StringJoin")


def test_tensors_follow_from_their_ancestors():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder("float32", [2], name="x")
        y = tf.sin(x, name="y")
        with tf.control_dependencies([tf.no_op(name="before")]):
            z = tf.cos(y, name="z")
        other = tf.exp(x, name="other").op
    assert {*internals.ancestors([z])} == {"x", "y", "z"}
    assert {*internals.ancestors([z], lambda t: t is y)} == {"z"}
    assert "before" in internals.ancestors([z], controls=lambda _: True)
    assert "other" in internals.ancestors([z], effects=[other])
