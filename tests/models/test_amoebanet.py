"""AmoebaNet-D: sizes to the unit, shapes, saving, and what a cell computes."""

import itertools

import keras
import numpy as np
import pytest
from stacks import build, no_weights_allocated

from models import amoebanet
from models.amoebanet_layers import AmoebaNetCell


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "expected"),
    [
        (18, 208, 81_505_540),
        pytest.param(18, 416, 319_024_120, marks=pytest.mark.slow),
        pytest.param(18, 544, 542_734_840, marks=pytest.mark.slow),
        (36, 544, 1_055_832_376),
        pytest.param(72, 512, 1_844_858_344, marks=pytest.mark.slow),
        pytest.param(18, 256, 122_470_120, marks=pytest.mark.slow),
    ],
)
def test_parameters_of_table_1_models_are_exact(
    num_layers, num_filters, expected
):
    with no_weights_allocated():
        layers = amoebanet.amoebanet_d(num_layers, num_filters)
        build(layers, (None, 224, 224, 3))
    assert len(layers) == 3 + num_layers + 2 + 1
    weights = [v for layer in layers for v in layer.trainable_variables]
    assert sum(int(np.prod(v.shape)) for v in weights) == expected
    assert all(v._value is None for v in weights)


def test_imagenet_shapes_follow_the_paper():
    with no_weights_allocated():
        layers = amoebanet.amoebanet_d(3, 208)
        shapes = build(layers, (None, 224, 224, 3))
    assert [layer.name for layer in layers] == [
        "stem_conv",
        "stem_reduction_1",
        "stem_reduction_2",
        "normal_1",
        "reduction_1",
        "normal_2",
        "reduction_2",
        "normal_3",
        "classifier",
    ]
    heads = [h for h, _ in shapes[:-1]]
    assert heads == [
        (None, 112, 112, 52),
        (None, 56, 56, 3 * 104),
        (None, 28, 28, 3 * 208),
        (None, 28, 28, 4 * 208),
        (None, 14, 14, 3 * 416),
        (None, 14, 14, 4 * 416),
        (None, 7, 7, 3 * 832),
        (None, 7, 7, 4 * 832),
    ]
    for (h, _), (_, h_prev) in itertools.pairwise(shapes[:-1]):
        assert h_prev == h
    assert shapes[-1] == (None, 1000)


def test_normal_cell_computes_the_sum_of_its_steps():
    cell = AmoebaNetCell(8)
    h, h_prev = (keras.random.normal((2, 6, 6, n), seed=n) for n in (8, 12))
    out, passed_on = cell((h, h_prev))
    s = [cell.enter(h), cell.enter_prev(h_prev)]
    op = cell.operations
    s.append(op[0](s[1]) + keras.ops.max_pool(s[1], 3, 1, "same"))
    s.append(s[1] + op[3](s[0]))
    s.append(op[4](s[0]) + op[5](s[0]))
    s.append(keras.ops.max_pool(s[2], 3, 1, "same") + s[2])
    s.append(keras.ops.average_pool(s[1], 3, 1, "same") + op[9](s[5]))
    expected = keras.ops.concatenate([s[0], s[3], s[4], s[6]], axis=-1)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(passed_on, h)
