r"""Chooses how a model is trained: cells, micro-batches, schedule, remat.

    tfgpipe plan --model=my_module:make_model --batch_size=64 \
        --num_devices=4 --machine=v100
    tfgpipe plan --model=train.py:make_model --batch_size=64 \
        --num_devices=4 --profile=profile.json --memory_gib=16

Nothing is allocated, so the model may be larger than this computer. The first
line of the table is the plan; below it is the call that trains so.
"""

from __future__ import annotations

import textwrap

from absl import flags

import tfgpipe
from tfgpipe.commands import command_line, user_model
from tfgpipe.commands.progress import doing
from tfgpipe.plans import Setting
from tfgpipe.profiles import Profile

FLAGS = command_line.new_flags()
user_model.define_model(FLAGS)
flags.DEFINE_integer(
    "batch_size", None, "Rows of a mini-batch.", 1, flag_values=FLAGS
)
flags.DEFINE_integer(
    "num_devices",
    None,
    "How many there are. Default: the accelerators here.",
    1,
    flag_values=FLAGS,
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
    "GiB that a device may hold. Default: the machine's.",
    0,
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "optimizer",
    "adam",
    "Whose slots are counted, by its name in Keras.",
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "num_replicas", 1, "R; 0 to have it chosen.", 0, flag_values=FLAGS
)


def run(values: flags.FlagValues) -> None:
    """Prints the plan."""
    command_line.require(values, "model", "batch_size")
    profile = None
    if values.profile is not None:
        profile = Profile.load(values.profile)
    model = user_model.load(values)
    model.known_inputs()  # or it says what is missing, in words of flags
    limit = values.memory_gib
    with doing("planning"):
        found = tfgpipe.plan(
            model.layers,
            values.batch_size,
            profile,
            devices=values.num_devices,
            memory_limit=None if limit is None else limit * 2**30,
            machine=values.machine,
            optimizer=values.optimizer,
            num_replicas=values.num_replicas or None,
            inputs=model.inputs,
        )
    print(f"{found}\n\n{_call(found.best.setting)}")


def _call(setting: Setting) -> str:
    """How a model of this setting is made."""
    given = ["layers", *(f"{k}={v!r}" for k, v in setting.arguments.items())]
    arguments = "".join(f"    {text},\n" for text in given)
    call = f"model = tfgpipe.GPipe(\n{arguments})"
    if setting.num_replicas == 1:
        return call
    grid = f"{setting.num_replicas}, {setting.num_devices}"
    scope = f"with tfgpipe.PipelineStrategy({grid}).scope():\n"
    return scope + textwrap.indent(call, "    ")
