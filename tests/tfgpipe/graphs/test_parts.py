"""What the cells of a model's graph take of each other."""

import tensorflow as tf
from keras import layers as kl
from traces import Watched, differentiated, traced

from tfgpipe.graphs import parts_of

SPEC = tf.TensorSpec([None, 4])


def parts(layers, x=SPEC, places=None, **kwargs):
    made = differentiated(traced(layers, x, places, **kwargs))
    num_cells = max(made.traced.cells) + 1
    return parts_of(made, num_cells, [[] for _ in made.dw])


class Does(kl.Layer):
    """Calls a function of all that comes in."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.built = True

    def call(self, xs):
        return self.function(*xs)


def names(tensors):
    return {t.name for t in tensors}


def test_skip_goes_straight_from_its_maker_to_each_cell_that_takes_it():
    """The cell in between does not hand it on."""
    layers = [
        Watched([SPEC]),
        Does(lambda x: (tf.sin(x),)),
        Does(lambda h: (h, tf.tanh(h))),
        Does(lambda h, y: (h, tf.exp(y))),
        Does(lambda h, y: h + y),
    ]
    found = parts(layers, [SPEC])
    (skip,) = found[1].gives
    assert [skip.name in names(part.takes) for part in found] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert [len(part.gives) for part in found] == [1, 1, 1, 1, 1]
    # So do the gradients of its uses, which are added up where the first is.
    assert [len(part.takes_back) for part in found] == [1, 1, 2, 1, 1]


def test_gradient_of_a_bias_is_made_where_the_bias_is_added():
    """A tape does not say of what sum it is the gradient."""
    dense, negative = kl.Dense(4), kl.Lambda(lambda x: -x)
    dense.build((None, 4))
    found = parts([dense, negative, kl.ReLU()])
    assert [len(part.uses) for part in found] == [2, 0, 0]
    own = [{part.whole.nodes[n].op for n in part.backward} for part in found]
    assert own == [{"BiasAddGrad", "MatMul"}, {"Neg"}, {"ReluGrad"}]


def test_operations_are_those_that_are_needed_or_have_side_effects():
    class Idle(kl.Layer):
        def call(self, x):
            tf.exp(x)
            tf.debugging.assert_all_finite(x, "")
            return tf.sin(x)

    (found,) = parts([Idle()])
    kinds = [op.type for op in found.operations]
    assert kinds[:2] == ["CheckNumerics", "Sin"]
    assert "Exp" not in kinds
    assert [op.type for op in found.effects] == ["CheckNumerics"]
