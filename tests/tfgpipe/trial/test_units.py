"""The tables of known layers are what a trial of each layer says."""

import warnings

import keras
import pytest
from every_layer import USES
from keras import layers as kl
from tried import tried

import tfgpipe
from tfgpipe.trial import units
from tfgpipe.trial.units import MIXES_ROWS, ROW_BY_ROW, is_row_by_row

# Other names of classes, and what has nothing of its own to try.
WITHOUT_USE = {"GroupQueryAttention", "Sequential"}


def facts_of(name, training, monkeypatch):
    """What a trial says of all layers of a use."""
    monkeypatch.setattr(units, "is_row_by_row", lambda layer, rank: False)
    use = USES[name]
    keras.config.set_floatx(use.dtype)
    keras.config.set_dtype_policy(use.dtype)
    model = tfgpipe.GPipe(use.make(), 1, 2)
    model.build((None, *use.x.shape[1:]))
    x = model.cast_inputs(keras.ops.convert_to_tensor(use.x))
    source = model.built_for("a test").source
    own = tried(
        source.layers, x, training, use.x, model.cast_inputs, source.call
    )
    (found,) = own.tried
    return [text for *_, text in found.facts]


def test_known_layers_have_a_use_each():
    used = {name.split("/")[0] for name in USES}
    assert ROW_BY_ROW - used <= WITHOUT_USE
    assert used >= MIXES_ROWS


@pytest.mark.parametrize(
    ("layer", "least"),
    [
        (lambda: kl.Softmax(), 2),
        (lambda: kl.Activation("softmax"), 2),
        (lambda: kl.CategoryEncoding(3, output_mode="count"), 2),
        (lambda: kl.EinsumDense("ab,bc->ac", 3), 2),
        (lambda: kl.EinsumDense("...b,bc->...c", 3), 2),
        (lambda: kl.Attention(), 3),
        (lambda: kl.MultiHeadAttention(1, 2, attention_axes=1), 3),
        (lambda: kl.TimeDistributed(kl.Attention()), 4),
        # These may take the rows' axis at any rank.
        (lambda: kl.Softmax(axis=0), 9),
        (lambda: kl.Softmax(axis=-2), 9),
        (lambda: kl.UnitNormalization(axis=(0, 1)), 9),
        (lambda: kl.EinsumDense("ab,bc->ca", 3), 9),
        (lambda: kl.EinsumDense("ab,ac->ac", 3), 9),
        (lambda: kl.MultiHeadAttention(1, 2, attention_axes=0), 9),
    ],
)
def test_layers_are_known_for_ranks_at_which_they_leave_rows_alone(
    layer, least
):
    ranks = [rank for rank in range(1, 9) if is_row_by_row(layer(), rank)]
    assert ranks == [*range(least, 9)]


def vectors(layer):
    """A model whose layer gets a number for each row."""
    x = keras.Input((4,))
    h = layer(kl.Reshape(())(kl.Dense(1)(x)))
    return keras.Model(x, kl.Reshape((1,))(h))


def matrices(layer):
    x = keras.Input((4,))
    return keras.Model(x, layer([kl.Dense(4)(x), x]))


OF_LOW_RANK = {
    "softmax": lambda: vectors(kl.Softmax(name="own")),
    "activation": lambda: vectors(kl.Activation("softmax", name="own")),
    "unit_norm": lambda: vectors(kl.UnitNormalization(name="own")),
    "attention": lambda: matrices(kl.Attention(name="own")),
    "additive": lambda: matrices(kl.AdditiveAttention(name="own")),
    "einsum": lambda: vectors(
        lambda x: kl.EinsumDense(
            "ab,b->a", (), activation="softmax", name="own"
        )(kl.Reshape((1,))(x))
    ),
}


@pytest.mark.parametrize("name", OF_LOW_RANK)
def test_known_layer_that_mixes_rows_at_a_low_rank_is_found(name):
    model = tfgpipe.GPipe(OF_LOW_RANK[name](), 1, 2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="'own' mixes the rows"):
        model.predict(keras.random.normal((6, 4)), batch_size=6, verbose=0)


def test_known_layer_that_treats_numbers_apart_is_left_alone():
    model = tfgpipe.GPipe(vectors(kl.Activation("relu")), 1, 2)
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(keras.random.normal((6, 4)), batch_size=6, verbose=0)


def test_layers_with_methods_of_a_user_are_not_known():
    layer = kl.Dense(3)
    layer.build((None, 3))
    assert is_row_by_row(layer, 2)
    layer.compute_mask = lambda x, mask=None: None
    assert not is_row_by_row(layer, 2)


def test_layer_of_keras_that_mixes_rows_as_it_is_set_is_found():
    model = tfgpipe.GPipe([kl.Dense(3), kl.Softmax(axis=-2)], 1, 2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="mixes the rows"):
        model.predict(keras.random.normal((6, 3)), batch_size=6, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "name", [name for name in USES if name.split("/")[0] in ROW_BY_ROW]
)
def test_trial_of_a_known_layer_finds_nothing(name, training, monkeypatch):
    assert not facts_of(name, training, monkeypatch)
