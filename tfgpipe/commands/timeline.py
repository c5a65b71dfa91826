r"""Shows when each task of a schedule runs, if nothing else takes time.

    tfgpipe timeline --schedule=1f1b --num_partitions=4 --num_micro_batches=8
    tfgpipe timeline --schedule=zero_bubble --num_partitions=8 \
        --num_micro_batches=32 --remat=never --output=zero_bubble.png

Nothing is run: all cells take the same time. Printed are the tasks of each
device, and what follows from them; --output draws it. Of a model that trains,
`tfgpipe.timeline.measure` and `tfgpipe.callbacks.PipelineMonitor` tell.
"""

from __future__ import annotations

from absl import flags

from tfgpipe import timeline
from tfgpipe.commands import command_line
from tfgpipe.monitor import save_picture
from tfgpipe.schedules import CHUNKS, KINDS, REMAT, SCHEDULES, rule_of

FLAGS = command_line.new_flags()
flags.DEFINE_enum(
    "schedule",
    "gpipe",
    list(SCHEDULES),
    "Order of the tasks on each device.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "remat",
    "except_last",
    f"What the backward pass recomputes: one of {', '.join(REMAT)}, or the "
    'share of what "never" keeps that is kept, such as 0.4.',
    flag_values=FLAGS,
)
command_line.define_cells(FLAGS, 4, 8)
flags.DEFINE_string(
    "output", None, "Picture to draw, .png or .svg.", flag_values=FLAGS
)

_FORWARD = 0.001  # seconds of a forward task


def run(values: flags.FlagValues) -> None:
    """Prints the tasks, and draws them."""
    k, m = values.num_partitions, values.num_micro_batches
    chunks = CHUNKS[values.schedule] or 2
    if k % chunks:
        raise ValueError(
            f"--num_partitions must be {chunks} times the number of devices. "
            f"Received: --num_partitions={k}."
        )
    schedule = SCHEDULES[values.schedule](k // chunks, m, chunks)
    program = schedule.program(rule_of(values.remat))
    path = command_line.output_path(values.output)
    print(program)
    if path is None:
        return
    events = timeline.simulated(
        program, lambda op: _FORWARD * KINDS[op.kind].units
    )
    title = f"{values.schedule}: K = {k}, M = {m}, remat {values.remat}"
    save_picture(events, title, "Simulated: only tasks take time.", path)
    print(f"Wrote {path}.")
