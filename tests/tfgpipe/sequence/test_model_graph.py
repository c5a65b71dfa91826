"""A functional model, and its calls."""

import keras
import numpy as np
import pytest
from functional import residual, siamese
from keras import layers as kl

import tfgpipe


def test_state_of_a_layer_that_is_called_in_several_cells_has_the_same_bits():
    def trained(k):
        keras.utils.set_random_seed(3)
        x = keras.Input((4,))
        norm, dropout = kl.BatchNormalization(), kl.Dropout(0.3)
        h = kl.Dense(4)(dropout(norm(kl.Dense(4)(x))))
        model = tfgpipe.GPipe(keras.Model(x, dropout(norm(h))), k, 2)
        model.compile("adam", "mse")
        rows = np.random.default_rng(0).standard_normal((6, 4))
        model.fit(rows, rows, 6, epochs=2, shuffle=False, verbose=0)
        called = [norm.name in cell.layers for cell in model.cells()]
        return sum(called), model.get_weights()

    (one, expected), (several, found) = trained(1), trained(3)
    assert several > one
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_costs_and_cuts_by_hand():
    calls = tfgpipe.layers_of(residual())
    count = len(calls)
    model = tfgpipe.GPipe(
        [[call, 1.0] for call in calls], 2, layers_per_cell=[3, count - 3]
    )
    assert [cell.cost for cell in model.cells()] == [3, count - 3]
    assert [len(cell.layers) for cell in model.cells()] == [3, count - 3]
    with pytest.raises(ValueError, match=r"14 calls .* Received: 13"):
        tfgpipe.GPipe(calls[1:], 2)


def test_cost_may_be_a_function_of_what_a_layer_is_called_on():
    calls = tfgpipe.layers_of(residual())
    seen = []

    def cost(layer, spec):
        seen.append((layer.name, spec.shape))
        return 1

    tfgpipe.GPipe([(calls[0], cost), *calls[1:]], 2)
    assert seen == [(calls[0].layer.name, (None, 5))]


def test_sequential_is_taken_as_its_layers():
    layers = [keras.Input((4,)), kl.Dense(3), kl.Dense(2)]
    model = keras.Sequential(layers)
    pipeline = tfgpipe.GPipe(model, 2, 2)
    assert pipeline.layers == model.layers
    assert pipeline.input_shape == (None, 4)
    unbuilt = tfgpipe.GPipe(keras.Sequential(layers[1:]), 2, 2)
    assert not unbuilt.built


def test_sequential_for_one_size_of_batches_is_one_for_any():
    model = keras.Sequential([keras.Input(batch_shape=(2, 3)), kl.Dense(1)])
    assert tfgpipe.GPipe(model, 1, 2).input_shape == (None, 3)


def test_inputs_of_one_size_of_batches_are_refused():
    x = keras.Input(batch_shape=(4, 3), name="pixels")
    with pytest.raises(ValueError, match="batches of any size") as error:
        tfgpipe.GPipe(keras.Model(x, kl.Dense(1)(x)), 1, 2)
    assert "input 'pixels'" in str(error.value)


def test_other_inputs_are_refused_by_name():
    model = tfgpipe.GPipe(siamese(), 2, 2)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"the inputs \['a', 'b'\]"):
        model.predict({"a": np.ones((2, 4))}, verbose=0)


def test_sparse_inputs_are_refused():
    x = keras.Input((3,), sparse=True, name="counts")
    with pytest.raises(ValueError, match="must be dense") as error:
        tfgpipe.GPipe(keras.Model(x, kl.Dense(1)(x)), 1, 2)
    assert "input 'counts'" in str(error.value)


class OwnStep(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return 0.0


class OwnSequentialCall(keras.Sequential):
    def call(self, x, training=None):
        return super().call(x, training=training) * 2.0


def test_what_a_class_does_beside_its_layers_is_refused():
    x = keras.Input((3,))
    with pytest.raises(ValueError, match="overrides compute_loss") as error:
        tfgpipe.GPipe(OwnStep(x, kl.Dense(1)(x)), 1)
    assert "in a subclass of `tfgpipe.GPipe`" in str(error.value)


def test_call_of_a_class_is_what_is_called():
    model = OwnSequentialCall([keras.Input((3,)), kl.Dense(1)])
    found = tfgpipe.GPipe(model, 1).predict(np.ones((2, 3)), verbose=0)
    np.testing.assert_allclose(found, model(np.ones((2, 3))), 1e-6)


@pytest.mark.parametrize("base", [keras.Model, keras.Sequential])
@pytest.mark.parametrize(
    "name", ["losses", "trainable_weights", "_compute_loss", "metrics"]
)
def test_what_a_class_overrides_of_training_is_refused(base, name):
    x = keras.Input((3,))
    y = kl.Dense(1)
    mixin = type("Mixin", (), {name: property(lambda self: [])})
    own = type("Own", (mixin, base), {})
    model = own([x, y]) if base is keras.Sequential else own(x, y(x))
    with pytest.raises(ValueError, match=f"overrides {name}"):
        tfgpipe.layers_of(model)


def test_methods_of_a_model_alone_that_train_are_refused():
    x = keras.Input((3,))
    model = keras.Model(x, kl.Dense(1)(x))
    model.train_step = lambda data: {}
    with pytest.raises(ValueError, match="overrides train_step"):
        tfgpipe.layers_of(model)


class Task(keras.Model):
    """As one of KerasHub: it looks at what it is called on, and prepares."""

    def __init__(self, preprocessor=None):
        self.preprocessor = preprocessor
        x = keras.Input((3,))
        super().__init__(x, kl.Dense(2)(kl.Dense(3)(x)))

    def __call__(self, *args, **kwargs):
        if isinstance(args[0], str):
            raise ValueError("no text")
        return super().__call__(*args, **kwargs)

    @property
    def layers(self):
        return super().layers[1:]

    def compile(self, optimizer="adam", **kwargs):
        super().compile(optimizer, **kwargs)

    def fit(self, x, *args, **kwargs):
        return super().fit(self.preprocessor(x), *args, **kwargs)

    def _post_quantize(self, mode, **kwargs):
        super()._post_quantize(mode, **kwargs)


def test_class_that_trains_as_keras_does_is_taken_apart():
    assert len(tfgpipe.layers_of(Task())) == 2


def test_fit_that_prepares_data_is_refused():
    with pytest.raises(ValueError, match="overrides fit"):
        tfgpipe.GPipe(Task(preprocessor=abs), 2, 1)


def confused():
    """A model of tensors that it has, whose layer is called before, too."""
    dense = kl.Dense(3)
    x, y = keras.Input((4,)), keras.Input((4,))
    before, z = dense(y), dense(x)
    inner = keras.Model(x, z)
    return keras.Model([x, y], abs(z - inner(y)) + before)


def test_model_that_keras_would_read_as_another_one_is_refused(tmp_path):
    tfgpipe.GPipe(confused(), 2).save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"Keras confuses .* Make the inner"):
        tfgpipe.load_model(tmp_path / "model.keras")
