"""Experiments: the registry, overrides, and the optimizer they describe."""

import dataclasses
import doctest

import keras
import numpy as np
import pytest

import params
from params import datasets, names, registry
from params.optimizer import Optimizer

DEMO = "image.amoebanet_d_demo"


@pytest.mark.parametrize("experiment", params.all_experiments())
def test_every_experiment_names_data_and_layers_that_exist(experiment):
    assert experiment.data in datasets.LOADERS
    layers = experiment.model.layers()
    assert all(isinstance(layer, keras.layers.Layer) for layer in layers)
    assert len(layers) >= experiment.num_partitions
    assert experiment.name == registry.get(experiment.name).name
    assert experiment.description
    assert experiment.expected_result


def test_layers_are_new_each_time():
    model = params.get(DEMO).model
    assert model.layers()[0] is not model.layers()[0]


def test_unknown_experiment_suggests_the_nearest():
    with pytest.raises(ValueError, match=f"Did you mean '{DEMO}'"):
        params.get("image.amebanet_demo")


def test_name_is_registered_only_once():
    with pytest.raises(ValueError, match="registered already"):
        params.register(params.get(DEMO))


def test_override_changes_a_field_and_leaves_the_original():
    before = params.get(DEMO)
    after = params.override(before, ["epochs=7"])
    assert after.epochs == 7
    assert dataclasses.replace(after, epochs=before.epochs) == before


def test_override_reaches_nested_fields():
    after = params.override(
        params.get(DEMO),
        [
            "model.num_filters=64",
            "optimizer.learning_rate=1e-2",
            "optimizer.kind=sgd",
        ],
    )
    assert after.model.num_filters == 64
    assert after.optimizer.learning_rate == 0.01
    assert after.optimizer.kind == "sgd"


def test_override_reads_tuples_and_none():
    before = params.get(DEMO)
    cut = params.override(before, ["layers_per_cell=3,4"])
    assert cut.layers_per_cell == (3, 4)
    assert params.override(cut, ["layers_per_cell=none"]) == (
        dataclasses.replace(before, layers_per_cell=None)
    )


def test_override_without_assignments_returns_the_same():
    assert params.override(params.get(DEMO), []) is params.get(DEMO)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("epochs", "form field=value"),
        ("epoch=3", "Did you mean 'epochs'"),
        ("model.num_filter=3", r"Did you mean 'model\.num_filters'"),
        ("epochs=three", "epochs a value of type int"),
        ("epochs=2.5", "epochs a value of type int"),
        ("optimizer.learning_rate=fast", "value of type float"),
        ("layers_per_cell=1,x", r"tuple\[int, \.\.\.\] \| None"),
        ("model=64", "one field of model: num_layers"),
        ("epochs.x=3", "value without fields"),
        ("epochs=0", "`epochs` must be positive"),
        ("num_micro_batches=1000", "at most `batch_size`"),
        ("optimizer.kind=adan", "Did you mean 'adam'"),
    ],
)
def test_bad_override_is_an_error_with_the_cure(assignment, message):
    with pytest.raises(ValueError, match=message):
        params.override(params.get(DEMO), [assignment])


def test_override_reads_booleans():
    @dataclasses.dataclass(frozen=True)
    class Switch:
        on: bool = False

    assert params.override(Switch(), ["on=true"]).on is True
    assert params.override(Switch(True), ["on=False"]).on is False
    with pytest.raises(ValueError, match="value of type bool"):
        params.override(Switch(), ["on=maybe"])


def test_learning_rate_warms_up_and_decays():
    optimizer = Optimizer("adam", 1.0, warmup_share=0.2, final_share=0.1)
    rate = optimizer.make(100)._learning_rate
    rates = [float(rate(step)) for step in (0, 10, 20, 60, 100)]
    np.testing.assert_allclose(rates, [0.1, 0.55, 1, 0.55, 0.1], rtol=1e-5)


def test_learning_rate_without_warmup_starts_at_the_top():
    rate = Optimizer("sgd", 1.0, warmup_share=0).make(10)._learning_rate
    assert float(rate(0)) == 1
    assert float(rate(10)) == 0


@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop", "sgd"])
def test_optimizer_has_what_the_experiment_says(kind):
    optimizer = Optimizer(kind, momentum=0.5, weight_decay=0.01).make(10)
    assert type(optimizer).__name__.lower() == kind
    assert optimizer.weight_decay == 0.01
    assert getattr(optimizer, "momentum", 0.5) == 0.5


def test_bad_optimizer_is_one_error_that_names_all():
    with pytest.raises(ValueError, match="`kind`") as error:
        Optimizer("adan", -1.0, 1.0, 2.0, -1.0, -0.1)
    for name in (
        "learning_rate",
        "warmup_share",
        "final_share",
        "momentum",
        "weight_decay",
    ):
        assert f"{name}=" in str(error.value)


@pytest.mark.parametrize("module", [datasets, names])
def test_examples_in_the_docstrings_run(module):
    assert doctest.testmod(module).failed == 0
