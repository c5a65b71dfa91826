"""The calls of a model, and of the models inside it."""

import keras
import numpy as np
import pytest
from functional import nested, siamese
from keras import layers as kl

import tfgpipe
from tfgpipe import internals
from tfgpipe.sequence.graph_calls import AsInput, GraphCalls


def names(model):
    return [type(call.operation).__name__ for call in GraphCalls(model).found]


def test_calls_of_a_nested_model_take_its_place():
    assert names(siamese()).count("Dense") == 5
    assert "Sequential" not in names(siamese())


def test_inputs_of_a_nested_model_are_made_to_fit_it():
    """It is called on integers, and on what is of its dtype already."""
    assert names(nested()).count("AsInput") == 1


def test_value_of_a_model_that_is_called_twice_is_that_of_each_call():
    x = keras.Input((3,))
    inner = keras.Sequential([keras.Input((3,)), kl.Dense(3)])
    first, second, add = GraphCalls(
        keras.Model(x, kl.Add()([inner(x), inner(inner.layers[0](x))]))
    ).found[-3:]
    assert first.operation is second.operation
    assert first.outputs != second.outputs
    assert add.operation.__class__ is kl.Add


def doubled(model):
    call = model.call
    model.call = lambda *args, **kwargs: 2 * call(*args, **kwargs)


def regularized(model):
    model.activity_regularizer = keras.regularizers.L2(0.1)


class OwnCall(keras.Sequential):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


@pytest.mark.parametrize("change", [doubled, regularized])
def test_nested_model_that_does_more_than_its_layers_is_a_call(change):
    x = keras.Input((3,))
    inner = keras.Sequential([keras.Input((3,)), kl.Dense(3)])
    graph = keras.Model(x, kl.Dense(3)(x))
    for model in (inner, graph):
        change(model)
    outer = keras.Model(x, inner(x))
    assert names(outer) == ["Sequential"]
    for model in (inner, graph):
        if change is regularized:
            with pytest.raises(ValueError, match="no `activity_regularizer`"):
                tfgpipe.GPipe(model, 1)
        else:
            pipeline = tfgpipe.GPipe(model, 1)
            found = pipeline.predict(np.ones((2, 3)), verbose=0)
            np.testing.assert_allclose(found, model(np.ones((2, 3))), 1e-6)


def test_nested_sequential_with_its_own_dunder_call_is_a_call():
    x = keras.Input((3,))
    assert "OwnCall" in names(keras.Model(x, OwnCall([kl.Dense(3)])(x)))


def test_inputs_are_cast_and_their_ranks_fitted():
    x = np.arange(6).reshape(2, 3)
    assert AsInput("float32", 2)(x).dtype == "float32"
    assert AsInput("float32", 3)(x).shape == (2, 3, 1)
    assert AsInput("int32", 1)(x[:, :1]).shape == (2,)


def test_mask_goes_along_with_an_input_that_is_cast():
    x = keras.ops.ones((2, 3), "int32")
    mask = keras.ops.ones((2,), "bool")
    assert internals.get_mask(AsInput("float32", 2)(x, mask)) is mask
    internals.set_mask(x, mask)
    assert internals.get_mask(AsInput("float32", 2)(x)) is mask


@pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a mask")
@pytest.mark.parametrize("mask_zero", [False, True])
def test_mask_that_comes_to_a_nested_model_is_found(mask_zero):
    x = keras.Input((4, 3))
    inner = keras.Model(x, kl.MultiHeadAttention(1, 3)(x, x))
    tokens = keras.Input((4,), dtype="int32")
    h = kl.Embedding(9, 3, mask_zero=mask_zero)(tokens)
    model = keras.Model(tokens, inner(h))
    assert GraphCalls(model).has_masks == mask_zero


class Halves(kl.Layer):
    """Fails where the length is not known; its word is taken till then."""

    def call(self, x):
        return x[:, : x.shape[1] // 2]

    def compute_output_shape(self, shape):
        return (shape[0], None, shape[2])


@pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a mask")
@pytest.mark.parametrize("mask_zero", [False, True])
def test_masks_are_found_where_a_model_needs_sizes(mask_zero):
    tokens = keras.Input((None,), dtype="int32")
    h = Halves()(kl.Embedding(9, 3, mask_zero=mask_zero)(tokens))
    model = keras.Model(tokens, kl.GRU(3)(h))
    assert GraphCalls(model).has_masks == mask_zero


class Fails(Halves):
    def call(self, x):
        raise ValueError("not now")


def test_masks_may_come_where_a_model_fails():
    x = keras.Input((4, 3))
    assert GraphCalls(keras.Model(x, Fails()(x))).has_masks


@pytest.mark.parametrize("is_nested", [False, True])
def test_operation_reads_variables_in_the_precision_of_its_model(is_nested):
    x = keras.Input((3,), dtype="float32")
    dense = kl.Dense(3, dtype="float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Model(x, dense(x) * dense.bias)
    keras.config.set_dtype_policy("float32")
    if is_nested:
        outer = keras.Input((3,), dtype="float32")
        model = keras.Model(outer, model(outer))
    dense.bias.assign([1.001, 2.003, 3.007])  # none a bfloat16
    data = np.random.default_rng(0).standard_normal((4, 3), "float32")
    expected = model.predict(data, verbose=0)
    found = tfgpipe.GPipe(model, 1).predict(data, verbose=0)
    np.testing.assert_array_equal(found, expected)
    precise = (data @ dense.kernel + dense.bias) * dense.bias
    assert np.abs(expected - precise).max() > 1e-4


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
@pytest.mark.parametrize("are_named", [False, True])
def test_nested_model_takes_of_a_dict_what_it_takes_in_keras(are_named):
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    inputs = {"a": a, "b": b} if are_named else [a, b]
    inner = keras.Model(inputs, kl.Dense(2)(kl.Concatenate()([a, 2.0 * b])))
    x = keras.Input((3,))
    made = {"aa": kl.Dense(3)(x), "b": kl.Dense(3)(x), "a": x}
    model = keras.Model(x, inner(made))
    data = np.random.default_rng(0).standard_normal((4, 3))
    found = tfgpipe.GPipe(model, 2).predict(data, verbose=0)
    np.testing.assert_allclose(found, model.predict(data, verbose=0), 1e-6)
