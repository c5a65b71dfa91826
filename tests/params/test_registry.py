"""Experiments: the registry, overrides, and the optimizer they describe."""

import keras
import numpy as np
import pytest

import params
from params import (
    registry,
)
from params.images import Images
from params.optimizer import Optimizer
from params.pairs import Pairs
from params.random_data import RandomPairs
from params.task import Classification

DEMO = "image.amoebanet_d_demo"
KINDS = ["adafactor", "adam", "adamw", "rmsprop", "sgd"]


# Too large to make at all; their small twins are as good.
FULL_SIZE = (
    "image.amoebanet_d_36_544",
    "image.amoebanet_d_72_512",
    "lm.transformer_103",
    "lm.transformer_415",
    "lm.transformer_1663",
    "mt.t_32_16384_32",
    "mt.t_64_16384_32",
)
NAMES = {experiment.name for experiment in params.all_experiments()}
EXPERIMENTS = [
    pytest.param(
        experiment,
        id=experiment.name,
        # Their small twins have as many cells, of fewer layers.
        marks=pytest.mark.slow if f"{experiment.name}_small" in NAMES else (),
    )
    for experiment in params.all_experiments()
    if experiment.name not in FULL_SIZE
]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_enough_layers_for_its_cells(experiment):
    layers = experiment.model.layers()
    assert all(isinstance(layer, keras.layers.Layer) for layer in layers)
    assert len(layers) >= experiment.num_partitions
    assert len({layer.name for layer in layers}) == len(layers)
    assert experiment.name == registry.get(experiment.name).name
    assert experiment.description
    assert experiment.expected_result


@pytest.mark.parametrize("experiment", params.all_experiments())
def test_model_of_every_experiment_fits_its_data(experiment):
    model, data = experiment.model, experiment.data
    if isinstance(experiment.task, Classification):
        if isinstance(data, Images) and data.classes is not None:
            assert model.num_classes == len(data.classes)
        elif isinstance(data, Images):
            assert model.num_classes == 10
        else:
            assert model.num_classes == data.num_classes
        return
    assert model.vocab_size >= data.vocab_size
    length = data.widths[-1] if isinstance(data, Pairs) else data.length
    assert model.max_length >= length
    rows = experiment.batch_size
    if isinstance(data, (Pairs, RandomPairs)):
        rows //= length
    assert rows >= experiment.num_micro_batches


def test_unknown_experiment_suggests_the_nearest():
    with pytest.raises(ValueError, match=f"Did you mean '{DEMO}'"):
        params.get("image.amebanet_demo")


def test_learning_rate_warms_up_and_decays():
    optimizer = Optimizer("adam", 1.0, warmup_share=0.2, final_share=0.1)
    rate = optimizer.make(100)._learning_rate
    rates = [float(rate(step)) for step in (0, 10, 20, 60, 100)]
    np.testing.assert_allclose(rates, [0.1, 0.55, 1, 0.55, 0.1], rtol=1e-5)


def test_learning_rate_falls_as_the_root_of_the_step():
    rate = Optimizer("adam", 1.0, warmup_share=0.2, decay="inverse_sqrt")
    rate = rate.make(100)._learning_rate
    rates = [float(rate(step)) for step in (0, 10, 20, 80)]
    np.testing.assert_allclose(rates, [0.1, 0.55, 1, 0.5], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_has_what_the_experiment_says(kind):
    made = Optimizer(
        kind,
        momentum=0.5,
        weight_decay=0.01,
        clip_norm=2.0,
        rho=0.8,
        beta_2=0.7,
        epsilon=0.1,
    ).make(10)
    assert type(made).__name__.lower() == kind
    assert made.weight_decay == 0.01
    assert made.global_clipnorm == 2.0
    for field, value in (
        ("momentum", 0.5),
        ("rho", 0.8),
        ("beta_2", 0.7),
        ("epsilon", 0.1),
    ):
        assert getattr(made, field, value) == value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_slots_are_those_that_keras_makes(kind, momentum):
    shapes = [(3,), (3, 4), (2, 3, 4)]
    params_of = Optimizer(kind, momentum=momentum)
    made = params_of.make(10)
    made.build([keras.Variable(np.zeros(shape)) for shape in shapes])
    slots = [v for v in made.variables if len(v.shape)]
    assert sum(np.prod(v.shape) for v in slots) == sum(
        map(params_of.num_slot_values, shapes)
    )
