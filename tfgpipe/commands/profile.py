r"""Measures what each layer of a model takes, on one device.

    tfgpipe profile --model=my_module:make_model --batch_size=64 \
        --output=profile.json
    tfgpipe profile --model=train.py:make_model --batch_size=64 \
        --num_micro_batches=1,4,16 --device=GPU:0 --output=profile.json

The device holds one layer at a time, so the model may be larger. Rows are drawn
at random. `tfgpipe plan --profile=profile.json` plans with what was measured,
as do `tfgpipe.plan` and the `costs` of a `GPipe`.
"""

from __future__ import annotations

from absl import flags

import tfgpipe
from tfgpipe.commands import command_line, user_model
from tfgpipe.commands.command_line import BadFlags
from tfgpipe.commands.progress import doing

FLAGS = command_line.new_flags()
user_model.define_model(FLAGS)
user_model.define_rows(FLAGS)
flags.DEFINE_integer(
    "batch_size",
    None,
    "Rows of the largest micro-batch that may be planned, at best of the whole "
    "mini-batch.",
    1,
    flag_values=FLAGS,
)
flags.DEFINE_list(
    "num_micro_batches",
    None,
    "Into how many micro-batches these rows are split, such as 1,4,16: each "
    "such size is measured, others are on a line. Default: as many rows, a "
    "quarter and a sixteenth of them.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "device", None, "Default: the first accelerator.", flag_values=FLAGS
)
flags.DEFINE_float(
    "seconds",
    30.0,
    "For how long to measure, besides tracing.",
    0.01,
    flag_values=FLAGS,
)
flags.DEFINE_boolean(
    "jit_compile",
    None,
    "Let XLA compile the tasks. Default: on accelerators.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "optimizer",
    "adam",
    "Whose slots are counted, by its name in Keras.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "output", None, "The file that is written, JSON.", flag_values=FLAGS
)


def run(values: flags.FlagValues) -> None:
    """Measures, prints a table, and writes the file."""
    command_line.require(values, "model", "batch_size")
    sizes = _sizes(values)
    output = command_line.output_path(values.output)
    model = user_model.load(values)
    x = user_model.random_rows(
        model.known_inputs(), values.batch_size, values.num_ids
    )
    with doing("measuring"):
        compiles = values.jit_compile
        found = tfgpipe.profile(
            model.layers,
            x,
            micro_batch_sizes=sizes,
            device=values.device,
            seconds=values.seconds,
            jit_compile="auto" if compiles is None else compiles,
            optimizer=values.optimizer,
        )
    print(found)
    if output is not None:
        found.save(output)
        print(f"\nWrote {output}.")


def _sizes(values: flags.FlagValues) -> list[int] | None:
    """Rows of the micro-batches, the largest of each split; None by default."""
    rows, given = values.batch_size, values.num_micro_batches
    if given is None:
        return None
    try:
        counts = [int(text) for text in given]
    except ValueError:
        counts = []
    if not counts or not all(0 < count <= rows for count in counts):
        raise BadFlags(
            "--num_micro_batches must be numbers from 1 to --batch_size. "
            f"Received: --num_micro_batches={','.join(given)} and "
            f"--batch_size={rows}."
        )
    return sorted({-(-rows // count) for count in counts})
