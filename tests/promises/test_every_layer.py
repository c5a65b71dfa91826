"""Every layer of Keras gives in a pipeline what it gives in Keras."""

import keras
import pytest
from beside_keras import assert_close, normal, pipeline, trained
from every_layer import LEFT_OUT, USES
from keras import layers as kl


def plain(made):
    """A model of Keras: of layers, or the functional one that was made."""
    return made if isinstance(made, keras.Model) else keras.Sequential(made)


def test_all_layers_are_tried():
    classes = {
        value.__name__ for value in vars(kl).values() if isinstance(value, type)
    }
    tried = {name.split("/")[0] for name in USES}
    assert classes - tried <= set(LEFT_OUT)
    assert not tried & set(LEFT_OUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", USES)
def test_layer_gives_what_it_gives_in_keras(name):
    """Random ones at one micro-batch, and the same bits for any K."""
    use = USES[name]
    keras.config.set_floatx(use.dtype)
    keras.config.set_dtype_policy(use.dtype)
    rtol = {"float64": 1e-10, "float32": 1e-3}[use.dtype]
    y = normal(1)

    def found(model):
        return trained(use.make, model, use.x, y)

    expected = found(plain)
    is_split = not use.is_random and not use.mixes
    assert_close(found(pipeline(2, 2 if is_split else 1)), expected, rtol)
    if use.mixes:
        with pytest.warns(UserWarning, match="mixes the rows of a batch"):
            found(pipeline(2, 2))
    elif use.is_random:
        assert_close(found(pipeline(2, 2)), found(pipeline(1, 2)), 0.0)
