"""Sizes without weights are those of the weights, the cells, the slots."""

import dataclasses

import numpy as np

import params
import tfgpipe
from params.lm import TransformerLM
from params.random_data import RandomTokens
from tfgpipe.model.saving import spec_config
from tools.sizes.model_size import num_parameters, predicted

SMALL = dataclasses.replace(
    params.get("lm.transformer_103"),
    model=TransformerLM(3, 16, 32, 2, vocab_size=50, max_length=8),
    data=RandomTokens(8, 50),
    batch_size=8,
    num_micro_batches=2,
    num_partitions=2,
)


def test_cells_are_those_of_the_pipeline():
    sizes, prediction = predicted(SMALL)
    model = tfgpipe.GPipe(
        SMALL.model.layers(),
        num_partitions=SMALL.num_partitions,
        num_micro_batches=SMALL.num_micro_batches,
        layers_per_cell=[*prediction.setting.layers_per_cell],
    )
    spec = SMALL.data.source().input_spec
    model.build_from_config(spec_config(spec))
    assert len(sizes) == sum(len(cell.layers) for cell in model.cells())
    weights = [own.weights for own in prediction.memory]
    assert weights == [4 * cell.num_params for cell in model.cells()]
    # A pipeline also counts what state follows from: moments, for instance.
    flops = sum(size.flops for size in sizes)
    cost = sum(cell.cost for cell in model.cells())
    assert flops <= cost * (1 + 1e-9) and cost < 1.002 * flops
    optimizer = SMALL.optimizer.make(10)
    optimizer.build(model.trainable_variables)
    counters = optimizer.iterations, optimizer._learning_rate
    slots = [
        v for v in optimizer.variables if all(v is not c for c in counters)
    ]
    assert sum(own.slots for own in prediction.memory) == sum(
        4 * np.prod(v.shape) for v in slots
    )
    trainable = sum(np.prod(v.shape) for v in model.trainable_variables)
    assert num_parameters(SMALL) == trainable
    assert sum(own.gradients for own in prediction.memory) == 4 * trainable


def test_replicas_share_rows_and_slots():
    one = SMALL
    half = dataclasses.replace(one, batch_size=one.batch_size // 2)
    _, expected = predicted(half)
    _, found = predicted(one, num_replicas=2)
    for own, other in zip(found.memory, expected.memory, strict=True):
        assert own == other._replace(slots=other.slots // 2)
