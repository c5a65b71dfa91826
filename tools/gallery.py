"""Draws the pictures of docs/schedules.md and docs/cells.md.

    python -m tools.gallery

Nothing is trained: the timelines are simulated, all of the same work on the
same axis, and the model that is cut into cells has the weights that it begins
with. It runs on any machine; equal versions of matplotlib give equal files.
"""

import pathlib
import sys
from collections.abc import Callable

import keras
from absl import flags

import tfgpipe
from tfgpipe import timeline
from tfgpipe.commands import command_line
from tfgpipe.devices import local
from tfgpipe.schedules import CHUNKS, KINDS, SCHEDULES, Program
from tools.flags import define

FLAGS = command_line.new_flags()
define(
    FLAGS,
    output=("docs", "The folder for the files."),
)

NUM_DEVICES, NUM_MICRO_BATCHES = 4, 8
_FORWARD = 0.001  # seconds of all cells of a device; backward takes two


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.gallery", FLAGS, __doc__, _draw, argv)


def _draw(values: flags.FlagValues) -> None:
    folder = pathlib.Path(values.output)
    from PIL import Image  # comes with matplotlib

    local.hide_accelerators()
    local.split_cpu(NUM_DEVICES)
    for name, draw in PICTURES.items():
        draw(folder / name)
        with Image.open(folder / name) as picture:  # half as many bytes
            picture.convert("RGB").quantize(128).save(folder / name)
    print(f"Wrote {len(PICTURES)} pictures to {folder}.")


# ----------------------------------------------------------------- timelines
def program(schedule: str) -> Program:
    """What the timeline of a schedule shows; nothing is recomputed."""
    made = SCHEDULES[schedule](NUM_DEVICES, NUM_MICRO_BATCHES, chunks(schedule))
    return made.program()


def chunks(schedule: str) -> int:
    """How many cells a device has, each as much less work."""
    return CHUNKS[schedule] or 2


def _length(schedule: str) -> float:
    """Seconds."""
    return program(schedule).length() / chunks(schedule) * _FORWARD


def _timeline(schedule: str) -> Callable[[pathlib.Path], None]:
    def draw(path: pathlib.Path) -> None:
        from tfgpipe.monitor.drawing import timeline_picture  # matplotlib

        shown, cells = program(schedule), chunks(schedule)
        events = timeline.simulated(
            shown, lambda op: KINDS[op.kind].units * _FORWARD / cells
        )
        held = max(shown.held()) / cells
        each = f", {cells} cells each" if cells > 1 else ""
        timeline_picture(
            events,
            f'"{schedule}": {NUM_DEVICES} devices{each}, '
            f"{NUM_MICRO_BATCHES} micro-batches",
            f"{timeline.seconds(_length(schedule))}, bubble "
            f"{timeline.bubble(events):.0%}; a device holds the activations of "
            f"up to {held:g} micro-batches",
            end=max(map(_length, SCHEDULES)),
        ).save(path)

    return draw


# --------------------------------------------------------------------- cells
def _cells(costs: str) -> Callable[[pathlib.Path], None]:
    def draw(path: pathlib.Path) -> None:
        model = tfgpipe.GPipe(
            keras.applications.MobileNetV2(weights=None),
            NUM_DEVICES,
            devices=[f"CPU:{i}" for i in range(NUM_DEVICES)],
            costs=costs,
            name="MobileNetV2",
        )
        tfgpipe.plot_cells(model, path)

    return draw


PICTURES = {
    **{f"gallery_{name}.png": _timeline(name) for name in SCHEDULES},
    "gallery_cells.png": _cells("flops"),
    "gallery_cells_bytes.png": _cells("bytes"),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
