r"""Chooses how a model is trained: cells, micro-batches, schedule, remat.

    tfgpipe plan --model=my_module:make_model --batch_size=64 \
        --num_devices=4 --machine=v100
    tfgpipe plan --model=train.py:make_model --batch_size=64 \
        --num_devices=4 --profile=profile.json --memory_gib=16

No weights are allocated, unless the function reads or assigns some: so the
model may be larger than this computer. The first line of the table is the plan,
with the slots of Adam; below it is the call that trains so. `tfgpipe.plan` has
more choices, such as replicas.
"""

from __future__ import annotations

from absl import flags

import tfgpipe
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tfgpipe.profiles import Profile

FLAGS = command_line.new_flags()
command_line.define_model(FLAGS)
command_line.define_count(FLAGS, "batch_size", "Rows of a mini-batch.")
command_line.define_count(
    FLAGS, "num_devices", "How many there are. Default: the accelerators here."
)
flags.DEFINE_string(
    "machine",
    None,
    f"What the devices are: {', '.join(tfgpipe.MACHINES)}. Default: the GPUs "
    "here, or with a --profile none.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "profile",
    None,
    "File of `tfgpipe profile`: seconds as measured, not from FLOPs.",
    flag_values=FLAGS,
)
flags.DEFINE_float(
    "memory_gib",
    None,
    "GiB that a device has, a fifth of which is left free. Default: the "
    "machine's.",
    0,
    flag_values=FLAGS,
)


def run(values: flags.FlagValues) -> None:
    """Prints the plan."""
    command_line.require(values, "model", "batch_size")
    profile = None if values.profile is None else Profile.load(values.profile)
    try:
        with tfgpipe.deferred():
            layers, inputs = command_line.load_model(values.model)
    except ValueError:  # it reads or assigns weights, as to load them
        layers, inputs = command_line.load_model(values.model)
    limit = values.memory_gib
    with doing("planning"):
        plan = tfgpipe.plan(
            layers,
            values.batch_size,
            profile,
            devices=values.num_devices,
            memory_limit=None if limit is None else limit * 2**30,
            machine=values.machine,
            optimizer="adam",
            inputs=inputs,
        )
    arguments = "".join(
        f"    {name}={value!r},\n"
        for name, value in plan.best.setting.arguments.items()
    )
    print(f"{plan}\n\nmodel = tfgpipe.GPipe(\n    layers,\n{arguments})")
