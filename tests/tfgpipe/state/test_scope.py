import keras
import pytest
import tensorflow as tf

from tfgpipe.state.scope import StateScope


def test_new_value_that_is_not_taken_is_refused():
    """It would be lost, as that of a weight after its layer has run."""
    weight = keras.Variable([1.0], name="weight")
    state = keras.Variable([2.0], trainable=False)
    scope = StateScope([(state, tf.constant([3.0]))])
    scope.use_weights(0, [(weight, tf.constant([4.0]), None)])
    with scope:
        state.assign_add([1.0])
        weight.assign_add([1.0])
        (found,) = scope.new_values([weight])
        weight.assign_add([1.0])
    assert float(found[0]) == 5.0
    scope.new_values([state])
    with pytest.raises(ValueError, match=r"\['weight'\].*would lose"):
        scope.check_taken()
    scope.new_values([weight])
    scope.check_taken()
