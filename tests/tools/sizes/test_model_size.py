"""Sizes without weights are those of the weights, the cells, the slots."""

import dataclasses

import keras
import numpy as np
import pytest

import params
import tfgpipe
from params.image import AmoebaNetD
from params.lm import TransformerLM
from params.mt import Translation
from params.random_data import RandomImages, RandomPairs, RandomTokens
from tfgpipe.model.saving import spec_config
from tools.sizes.model_size import num_parameters, predicted

SMALL = {
    "image": dataclasses.replace(
        params.get("image.amoebanet_d_18_544"),
        model=AmoebaNetD(3, 16, 5),
        data=RandomImages(32, 5),
        batch_size=8,
        num_micro_batches=2,
        num_partitions=3,
    ),
    "lm": dataclasses.replace(
        params.get("lm.transformer_103"),
        model=TransformerLM(3, 16, 32, 2, vocab_size=50, max_length=8),
        data=RandomTokens(8, 50),
        batch_size=8,
        num_micro_batches=2,
        num_partitions=2,
    ),
    "mt": dataclasses.replace(
        params.get("mt.t_6_8192_16"),
        model=Translation(2, 16, 32, 2, vocab_size=50, head_dim=8),
        data=RandomPairs(8, 50),
        batch_size=64,
        num_micro_batches=2,
        num_partitions=2,
    ),
}


@pytest.fixture(
    params=[
        pytest.param("image", marks=pytest.mark.slow),  # many operations
        "lm",
        pytest.param("mt", marks=pytest.mark.slow),
    ]
)
def small(request):
    return SMALL[request.param]


def built(experiment, layers_per_cell=None):
    model = tfgpipe.GPipe(
        experiment.model.layers(),
        num_partitions=experiment.num_partitions,
        num_micro_batches=experiment.num_micro_batches,
        layers_per_cell=layers_per_cell,
    )
    spec = experiment.data.source().input_spec
    model.build_from_config(spec_config(spec))
    return model


def test_cells_are_those_of_the_pipeline(small):
    sizes, prediction = predicted(small)
    model = built(small, [*prediction.setting.layers_per_cell])
    assert len(sizes) == sum(len(cell.layers) for cell in model.cells())
    weights = [own.weights for own in prediction.memory]
    assert weights == [4 * cell.num_params for cell in model.cells()]
    # A pipeline also counts what state follows from: moments, for instance.
    flops = sum(size.flops for size in sizes)
    cost = sum(cell.cost for cell in model.cells())
    assert flops <= cost * (1 + 1e-9) and cost < 1.002 * flops
    optimizer = small.optimizer.make(10)
    optimizer.build(model.trainable_variables)
    counters = optimizer.iterations, optimizer._learning_rate
    slots = [
        v for v in optimizer.variables if all(v is not c for c in counters)
    ]
    assert sum(own.slots for own in prediction.memory) == sum(
        4 * np.prod(v.shape) for v in slots
    )
    trainable = sum(np.prod(v.shape) for v in model.trainable_variables)
    assert num_parameters(small) == trainable
    assert sum(own.gradients for own in prediction.memory) == 4 * trainable


def test_replicas_share_rows_and_slots():
    one = SMALL["lm"]
    half = dataclasses.replace(one, batch_size=one.batch_size // 2)
    _, expected = predicted(half)
    _, found = predicted(one, num_replicas=2)
    for own, other in zip(found.memory, expected.memory, strict=True):
        assert own == other._replace(slots=other.slots // 2)


class Reader(keras.layers.Layer):
    """Uses the weights of another layer."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def call(self, x):
        return x @ self.other.kernel


@dataclasses.dataclass(frozen=True)
class Tied:
    def layers(self):
        first, shared, equal = (
            keras.layers.Dense(16, use_bias=False) for _ in range(3)
        )
        readers = Reader(shared), Reader(shared)
        twice = [shared, shared, equal, *readers, equal]
        return [keras.layers.Flatten(), first, *twice]


def test_tied_weights_count_once():
    experiment = dataclasses.replace(
        SMALL["image"], model=Tied(), data=RandomImages(4, 16), num_partitions=1
    )
    expected = sum(np.prod(v.shape) for v in built(experiment).weights)
    assert expected == 4 * 4 * 3 * 16 + 2 * 16 * 16
    assert num_parameters(experiment) == expected
    _, prediction = predicted(experiment)
    assert prediction.memory[0].weights == 4 * expected
