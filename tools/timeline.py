r"""Measures when each task of a training step runs, and draws it.

    python -m tools.timeline --k=4 --m=8 --schedule=1f1b
    python -m tools.timeline --k=8 --m=16 --output=docs/timeline_gpipe.png

Every cell is one layer that waits instead of computing: as long forward as for
the gradient of its input and for that of its weight. So any number of devices
can be shown on any machine. It prints the tasks of each device, and the bubble
beside the ideal one, that is, if nothing but the tasks takes time. `tfgpipe
timeline` simulates; `tfgpipe.timeline.measure` takes a model of yours.
"""

import sys

import keras
import numpy as np
from absl import flags

from tfgpipe import timeline
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import BadFlags, doing
from tfgpipe.schedules import CHUNKS, REMAT, SCHEDULES
from tools.bench import efficiency
from tools.bench.waiting_layers import durations
from tools.flags import define

FLAGS = command_line.new_flags()
define(
    FLAGS,
    k=(4, "Devices."),
    m=(8, "Micro-batches."),
    schedule=("gpipe", "Order of the tasks on each device.", SCHEDULES),
    remat=("except_last", "What the backward pass recomputes.", REMAT),
    forward_ms=(20.0, "Milliseconds of a cell's forward task.", 0.01),
    output=(str, "The picture, a .png or .svg file."),
)


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.timeline", FLAGS, __doc__, _draw, argv)


def _draw(values: flags.FlagValues) -> None:
    path = command_line.output_path(values.output)
    if path is not None and path.suffix not in (".png", ".svg"):
        raise BadFlags(
            "--output must end with .png or .svg. Received: "
            f"--output={values.output}."
        )
    chunks = CHUNKS[values.schedule] or 2
    setting = efficiency.Setting(
        schedule=values.schedule,
        remat=values.remat,
        cells="equal",
        cell_ms=values.forward_ms * chunks,  # of all cells of a device
        k=values.k,
        m=values.m,
        chunks=chunks,
    )
    efficiency.make_devices(setting.k)
    model = setting.model()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    rows = np.ones((setting.m, 1), np.float32)
    with doing("running the step"):
        events = timeline.measure(model, rows, rows)
    program = timeline.program_of(events)
    ideal = timeline.simulated(program, durations(setting.seconds()))
    length, best = timeline.length(events), timeline.length(ideal)
    each = f" devices x {chunks} cells" if chunks > 1 else ""
    title = (
        f"{setting.schedule}: K = {setting.k}{each}, M = {setting.m}, "
        f"remat {setting.remat}"
    )
    numbers = (
        f"cells of {values.forward_ms:g} ms: bubble "
        f"{timeline.bubble(events):.1%} measured, {timeline.bubble(ideal):.1%} "
        f"ideal; the tasks take {timeline.seconds(length)}, "
        f"{length / best:.3f} times the ideal {timeline.seconds(best)}"
    )
    print(f"{title}\n{numbers}\n\n{program}")
    if path is not None:
        from tfgpipe.monitor.drawing import timeline_picture  # matplotlib

        timeline_picture(events, title, numbers, best).save(path)
        print(f"Wrote {path}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
