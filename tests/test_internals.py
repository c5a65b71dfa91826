"""A test for each private name: it fails when Keras or TensorFlow moves it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

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


def test_moved_variable_keeps_its_value():
    variable = keras.Variable([1.0, 2.0])
    with tf.device("CPU:2"):
        internals.move_variable(variable)
    assert variable.value.device.endswith("CPU:2")
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])


def test_masks_travel_with_tensors():
    tensor = tf.ones([2, 3])
    assert internals.get_mask(tensor) is None
    internals.set_mask(tensor, tf.constant([[True, True, False]] * 2))
    pooled = kl.GlobalAveragePooling1D()(tf.ones([2, 3, 1]) * 1.0)
    assert internals.get_mask(tensor).shape == (2, 3)
    assert pooled.shape == (2, 1)


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
    metrics = internals.flat_metrics(internals.compiled_metrics(model))
    assert [m.name for m in metrics] == ["mae"]
    assert internals.metric_function(metrics[0]).__name__ == (
        "mean_absolute_error"
    )
    assert internals.metric_function(keras.metrics.Mean()) is None
    assert internals.loss_tracker(model).name == "loss"


def test_losses_are_replaced_for_a_while():
    loss = internals.compiled_loss(compiled())
    ones, zeros = np.ones((2, 2)), np.zeros((2, 2))
    with internals.replaced_losses(loss, lambda i, f: lambda *a: 7.0 + i):
        assert float(loss(ones, zeros)) == 7.0
    assert float(loss(ones, zeros)) == 1.0


def test_arguments_of_wrapped_functions_are_found():
    loss = keras.losses.CosineSimilarity(axis=0)
    assert internals.function_arguments(loss) == {"axis": 0}
    metric = keras.metrics.CosineSimilarity(axis=0)
    assert internals.function_arguments(metric) == {"axis": 0}


def test_loss_with_its_own_call_is_told():
    class Own(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return 0.0

    assert internals.has_own_call(Own())
    assert not internals.has_own_call(keras.losses.MeanSquaredError())


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
    layer = kl.BatchNormalization()
    layer.build((None, 2))
    x = tf.constant([[1.0, 2.0], [3.0, 6.0]])
    seen = []
    with internals.recording_moments([layer], lambda *a: seen.append(a)):
        layer(x, training=True)
        layer(x, training=False)
    layer(x, training=True)
    ((found, _, mask, mean, variance),) = seen
    assert found is layer
    assert mask is None
    np.testing.assert_allclose(mean, [2.0, 4.0])
    np.testing.assert_allclose(variance, [1.0, 4.0])


@pytest.mark.parametrize("wrapped", [False, True])
def test_optimizer_does_not_reduce_over_replicas_inside(wrapped):
    optimizer = keras.optimizers.SGD()
    if wrapped:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    pairs = [(tf.ones([]), tf.Variable(1.0))]
    with internals.without_all_reduce(optimizer):
        assert inner._all_reduce_sum_gradients(pairs) is pairs
    assert inner._all_reduce_sum_gradients(pairs) is not pairs
    assert "_all_reduce_sum_gradients" not in vars(inner)


def attribute_of_call(scope):
    @tf.function
    def function(x):
        return x + 1.0

    concrete = function.get_concrete_function(tf.TensorSpec([2]))

    @tf.function
    def outer(x):
        with scope():
            return concrete(x)

    graph = outer.get_concrete_function(tf.TensorSpec([2])).graph
    (call,) = [o for o in graph.get_operations() if "Call" in o.type]
    config = tf.compat.v1.ConfigProto.FromString(call.get_attr("config_proto"))
    return config.graph_options.rewrite_options.disable_meta_optimizer


def test_calls_are_unoptimized_inside():
    import contextlib

    assert attribute_of_call(internals.unoptimized_calls)
    assert not attribute_of_call(contextlib.nullcontext)


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


def test_outer_tensor_is_what_was_captured():
    value = tf.constant([1.0])
    seen = []

    @tf.function
    def function():
        y = value + 1.0
        captured = y.op.inputs[0]
        seen.append(internals.outer_tensor(captured))
        seen.append(internals.outer_tensor(y))
        return y

    function()
    assert seen[0] is value
    assert seen[1] is None
    assert internals.is_eager(value)


def test_element_spec_of_an_epoch_is_found_without_reading_it():
    seen = []

    class Model(tfgpipe.GPipe):
        def _maybe_symbolic_build(self, iterator=None, data_batch=None):
            if iterator is not None:
                seen.append(internals.element_spec(iterator))
            super()._maybe_symbolic_build(iterator, data_batch)

    model = Model([kl.Dense(1)], 1)
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1])))
    model.fit(data, shuffle=False, verbose=0)
    assert seen[0][0] == tf.TensorSpec([4, 2])


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
    assert internals.is_keras(kl.Dense)
    assert internals.is_keras(keras.losses.mean_squared_error)
    assert not internals.is_keras(tfgpipe.GPipe)


@pytest.mark.parametrize(
    ("kind", "stateful"), [("PrintV2", True), ("MatMul", False), ("No", False)]
)
def test_side_effects_of_an_operation_are_told(kind, stateful):
    assert internals.is_stateful(kind) == stateful


def test_graph_of_a_called_function_is_found():
    inner = tf.function(lambda x: tf.cos(x), autograph=False)

    @tf.function
    def outer(x):
        return inner(x)

    graph = outer.get_concrete_function(tf.TensorSpec([1])).graph
    (call,) = [op for op in graph.get_operations() if "Call" in op.type]
    called = internals.function_graph(call, call.get_attr("f").name)
    assert "Cos" in [op.type for op in called.get_operations()]


def test_seed_generator_of_keras_keeps_its_value():
    """One that is made where variables are deferred would have none."""
    with internals.deferred_variables():
        keras.random.normal((2,))
    a, b = keras.random.normal((2,)), keras.random.normal((2,))
    assert not np.array_equal(a, b)
