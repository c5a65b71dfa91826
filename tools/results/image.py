"""AmoebaNet-D on images of clothing: does a pipeline reach a good accuracy?

The same layers in plain Keras, with the same batches and the same optimizer,
show what it should reach. They differ in that a pipeline normalises each
micro-batch by itself.
"""

from __future__ import annotations

import keras
from absl import flags

import params
from tools.report import Table, columns
from tools.results import runs
from tools.train.trainer import Trainer

FLAGS = runs.new_flags()

_EXPERIMENT = "image.amoebanet_d_fashion"
_GOAL = 0.9
_COLUMNS = columns(
    "model | num_params: parameters: , | num_steps: steps: , | "
    "minutes: minutes: .0f | accuracy: test accuracy: .2%"
)


class PlainTrainer(Trainer):
    """Trains an experiment's layers in plain Keras, without a pipeline."""

    def _new_model(self) -> keras.Model:
        keras.utils.set_random_seed(self.experiment.seed)
        inputs = keras.tree.map_structure(
            lambda spec: keras.Input(batch_shape=spec.shape, dtype=spec.dtype),
            self.source.input_spec,
        )
        x = inputs
        for layer in self.experiment.model.layers():
            x = layer(x)
        model = keras.Model(inputs, x)
        model.compile(
            optimizer=self.experiment.optimizer.make(self.num_steps),
            **self.experiment.task.compile_arguments(),
        )
        return model


def run(values: flags.FlagValues) -> list[Table]:
    """Trains both, and shows them side by side."""
    experiment = params.get(_EXPERIMENT)
    runs.prepare_devices(experiment.num_partitions)
    name = (
        f"GPipe, K={experiment.num_partitions}, "
        f"M={experiment.num_micro_batches}"
    )
    found = {
        name: runs.finish(experiment, values),
        "plain Keras": runs.finish(
            experiment,
            values,
            name=f"{experiment.name}_plain",
            maker=PlainTrainer,
        ),
    }
    return [
        Table(
            "image",
            f"{experiment.name}: {experiment.description}",
            _COLUMNS,
            [one.row(model) for model, one in found.items()],
            [f"The goal is {_GOAL:.0%}."],
        )
    ]
