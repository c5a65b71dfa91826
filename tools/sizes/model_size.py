"""What an experiment's model and its devices need, without allocating it.

`tfgpipe.plan` counts, for the settings that the experiment has.
"""

from __future__ import annotations

from typing import Any

import keras

from params import Experiment
from tfgpipe import internals
from tfgpipe.commands.command_line import doing
from tfgpipe.costs import LayerSize, Placed, num_params
from tfgpipe.plans import Prediction, Setting, SizedModel, predict
from tfgpipe.plans import sized as sized_model
from tfgpipe.plans.workload import Workload
from tfgpipe.profiles import MEASURED
from tfgpipe.schedules import devices_for
from tfgpipe.sequence import source_of, too_many_cells


def deferred_layers(experiment: Experiment) -> list[keras.layers.Layer]:
    """An experiment's layers, whose variables get no values."""
    with internals.deferred_variables():
        return experiment.model.layers()


def largest_inputs(experiment: Experiment) -> Any:
    """Those that need most memory, except for the number of rows."""
    return keras.tree.map_structure(
        lambda leaf: keras.KerasTensor((None, *leaf.shape[1:]), leaf.dtype),
        experiment.data.source().largest_batch(experiment.batch_size),
    )


def most_rows(experiment: Experiment) -> int:
    """Rows of the mini-batch that needs most memory."""
    batch = experiment.data.source().largest_batch(experiment.batch_size)
    return keras.tree.flatten(batch)[0].shape[0]


def num_parameters(experiment: Experiment) -> int:
    """Numbers in a model's trainable weights, tied ones once."""
    source = source_of(deferred_layers(experiment))
    return num_params(Placed(source, largest_inputs(experiment)))


def sized(experiment: Experiment) -> SizedModel:
    """The model's layers, for the inputs that need most memory."""
    return sized_model(
        source_of(deferred_layers(experiment)),
        largest_inputs(experiment),
        experiment.optimizer.make(10),
    )


def by_cost(model: SizedModel, rows: float) -> Workload:
    """For micro-batches of so many rows, where seconds mean nothing."""
    seconds = [dict.fromkeys(MEASURED, size.flops) for size in model.sizes]
    return model.workload(seconds, 0.0, rows)


def predicted(
    experiment: Experiment,
    num_devices: int | None = None,
    num_replicas: int = 1,
) -> tuple[list[LayerSize], Prediction]:
    """What an experiment's layers need, and what its settings come to."""
    with doing("counting what each device needs"):
        model = sized(experiment)
        setting = _setting(experiment, model, num_devices, num_replicas)
        parts = num_replicas * setting.num_micro_batches
        rows = -(-most_rows(experiment) // parts)
        return model.sizes, predict(by_cost(model, rows), setting, None)


def _setting(
    experiment: Experiment,
    model: SizedModel,
    num_devices: int | None,
    num_replicas: int,
) -> Setting:
    """The experiment's settings, cut as `tfgpipe.GPipe` cuts the model."""
    name, k = experiment.schedule, experiment.num_partitions
    if k > len(model.sizes):
        raise ValueError(too_many_cells(k, len(model.sizes)))
    d = devices_for(name, k, num_devices or k)
    cut = experiment.layers_per_cell or model.placed.source.cut(
        [size.flops for size in model.sizes], k
    )
    return Setting(
        num_replicas,
        d,
        tuple(cut),
        experiment.num_micro_batches,
        name,
        tuple(experiment.remat_rules),
        experiment.remat_groups or 1,
        experiment.head_parts,
        experiment.weights_on,
    )
