r"""Chooses how an experiment is trained: cells, micro-batches, schedule, remat.

    python -m tools.plan --params=lm.transformer_1663 --num_devices=128 \
        --machine=tpu_v3_core
    python -m tools.plan --params=lm.austen --machine=v100 --memory_gib=1

Nothing is allocated. The last line is a command that trains so.
"""

from __future__ import annotations

import dataclasses
import sys

from absl import flags

import params
import tfgpipe
from params import Experiment
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tfgpipe.plans import Plan
from tools.flags import define
from tools.sizes.model_size import (
    deferred_layers,
    largest_inputs,
    most_rows,
)

FLAGS = command_line.new_flags()
define(
    FLAGS,
    params=(str, "Name of the experiment."),
)
flags.DEFINE_multi_string(
    "set", [], "A field: --set=batch_size=64. Repeatable.", flag_values=FLAGS
)
define(
    FLAGS,
    machine=(str, f"What the devices are: {', '.join(tfgpipe.MACHINES)}."),
    num_devices=(int, "How many there are. Default: the accelerators here."),
    memory_gib=(float, "GiB that a device may hold. Default: the machine's."),
    num_replicas=(1, "R; 0 to have it chosen.", 0),
)


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.plan", FLAGS, __doc__, _print, argv)


def _print(values: flags.FlagValues) -> None:
    if values.params is None:
        raise ValueError("--params must name an experiment.")
    experiment = params.override(params.get(values.params), values.set)
    limit = values.memory_gib
    found = plan_of(
        experiment,
        values.machine,
        values.num_devices,
        None if limit is None else limit * 2**30,
        values.num_replicas or None,
    )
    print(found)
    planned = with_plan(experiment, found)
    fields = ("num_partitions", "num_micro_batches", "schedule", "remat")
    given = [f"--{name}={getattr(planned, name)}" for name in fields]
    cut = ",".join(map(str, planned.layers_per_cell or ()))
    given += [f"--set={text}" for text in values.set]
    given += [f"--set=layers_per_cell={cut}"]
    if planned.remat_groups is not None:
        given += [f"--set=remat_groups={planned.remat_groups}"]
    if planned.head_parts > 1:
        given += [f"--set=head_parts={planned.head_parts}"]
    if found.num_replicas > 1:
        given += [f"--num_replicas={found.num_replicas}"]
    print(f"\npython -m tools.train --params={values.params} {' '.join(given)}")


def plan_of(
    experiment: Experiment,
    machine: str | None,
    num_devices: int | None = None,
    memory_limit: float | None = None,
    num_replicas: int | None = 1,
) -> Plan:
    """The plan for an experiment's model, optimizer and mini-batches."""
    with doing(f"planning {experiment.name}"):
        return tfgpipe.plan(
            deferred_layers(experiment),
            most_rows(experiment),
            devices=num_devices,
            memory_limit=memory_limit,
            machine=machine,
            optimizer=experiment.optimizer.make(10),
            num_replicas=num_replicas,
            inputs=largest_inputs(experiment),
        )


def with_plan(experiment: Experiment, plan: Plan) -> Experiment:
    """The experiment, trained as planned."""
    setting = plan.best.setting
    rules = list(dict.fromkeys(setting.remat))
    return dataclasses.replace(
        experiment,
        num_partitions=setting.num_partitions,
        num_micro_batches=setting.num_micro_batches,
        layers_per_cell=setting.layers_per_cell,
        schedule=setting.schedule,
        remat=",".join(
            map(str, rules[:1] if len(rules) == 1 else setting.remat)
        ),
        remat_groups=setting.remat_groups,
        head_parts=setting.head_parts,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
