r"""Measures what each layer of a model takes, on one device.

    tfgpipe profile --model=my_module:make_model --batch_size=64 \
        --output=profile.json

The device, the first accelerator, holds one layer at a time, so the model may
be larger. Rows are drawn at random; as many, a quarter and a sixteenth of them
are measured. `tfgpipe plan --profile=profile.json` plans with what was
measured, as do `tfgpipe.plan` and the `costs` of a `GPipe`. `tfgpipe.profile`
has more choices.
"""

from __future__ import annotations

from absl import flags

import tfgpipe
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing

FLAGS = command_line.new_flags()
command_line.define_model(FLAGS)
command_line.define_count(
    FLAGS,
    "batch_size",
    "Rows of the largest micro-batch that may be planned, at best of the whole "
    "mini-batch.",
)
flags.DEFINE_float(
    "seconds",
    30.0,
    "For how long to measure, besides tracing.",
    0.01,
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "output", None, "The file that is written, JSON.", flag_values=FLAGS
)


def run(values: flags.FlagValues) -> None:
    """Measures, prints a table, and writes the file."""
    command_line.require(values, "model", "batch_size")
    output = command_line.output_path(values.output)
    layers, inputs = command_line.load_model(values.model)
    x = command_line.random_rows(inputs, values.batch_size)
    with doing("measuring"):
        profile = tfgpipe.profile(layers, x, seconds=values.seconds)
    print(profile)
    if output is not None:
        profile.save(output)
        print(f"\nWrote {output}.")
