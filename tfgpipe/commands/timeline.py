r"""Shows when each task of a schedule runs, if nothing else takes time.

    tfgpipe timeline --schedule=1f1b --num_partitions=4 --num_micro_batches=8
    tfgpipe timeline --schedule=zero_bubble --num_partitions=8 \
        --num_micro_batches=32 --remat=never --output=zero_bubble.png

Nothing is run: all cells take the same time. Printed are the tasks of each
device, and what follows from them. A file that ends with .png is a picture; one
with .json is for chrome://tracing or https://ui.perfetto.dev. Of a model that
trains, `tfgpipe.timeline.measure` and `tfgpipe.callbacks.PipelineMonitor` tell.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib

from absl import flags

from tfgpipe import timeline
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import BadFlags
from tfgpipe.files import write_text
from tfgpipe.monitor import chrome_trace, save_picture
from tfgpipe.schedules import CHUNKS, KINDS, SCHEDULES, Program

FLAGS = command_line.new_flags()
command_line.define_schedule(FLAGS)
flags.DEFINE_integer(
    "num_partitions", 4, "K, the number of cells.", 1, flag_values=FLAGS
)
flags.DEFINE_integer(
    "num_micro_batches",
    8,
    "M, the number of micro-batches.",
    1,
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "num_devices",
    None,
    "How many share the cells, with --schedule=interleaved. Default: one for "
    "every two cells.",
    1,
    flag_values=FLAGS,
)
flags.DEFINE_float(
    "forward_ms",
    1.0,
    "Milliseconds of a cell's forward task; one backward takes two.",
    0.001,
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "output", None, "File to write, .png or .json.", flag_values=FLAGS
)


def run(values: flags.FlagValues) -> None:
    """Prints the tasks, and writes the file."""
    program = _program(values)
    path = command_line.output_path(values.output)
    if path is not None:
        _check_suffix(path.suffix)
    print(program)
    if path is not None:
        _write(values, program, path)
        print(f"Wrote {path}.")


def _program(values: flags.FlagValues) -> Program:
    """What runs.

    Raises:
        BadFlags: If the cells cannot be shared out.
    """
    k, chunks = values.num_partitions, CHUNKS[values.schedule]
    if chunks is None:
        num_devices = values.num_devices or max(1, k // 2)
    else:
        num_devices = values.num_devices or k // chunks
    if (
        not num_devices
        or k % num_devices
        or chunks
        not in (
            None,
            k // num_devices,
        )
    ):
        times = {None: "a multiple of ", 1: ""}.get(chunks, f"{chunks} times ")
        raise BadFlags(
            f"--num_partitions must be {times}the number of devices under "
            f"--schedule={values.schedule}. Received: --num_partitions={k}"
            f"{_given(values.num_devices)}."
        )
    schedule = SCHEDULES[values.schedule](
        num_devices, values.num_micro_batches, k // num_devices
    )
    return schedule.program(values.remat)


def _given(num_devices: int | None) -> str:
    return "" if num_devices is None else f" and --num_devices={num_devices}"


def _check_suffix(suffix: str) -> None:
    if suffix not in (".png", ".json"):
        raise BadFlags(
            f"--output must end with .png or .json. Received: {suffix!r}."
        )
    if suffix == ".png" and not importlib.util.find_spec("matplotlib"):
        raise BadFlags(
            "--output draws with matplotlib, which is not installed. Install "
            "it with `pip install matplotlib`, or give a name with .json."
        )


def _write(
    values: flags.FlagValues, program: Program, path: pathlib.Path
) -> None:
    seconds = values.forward_ms / 1000
    events = timeline.simulated(
        program, lambda op: seconds * KINDS[op.kind].units
    )
    title = (
        f"{values.schedule}: K = {values.num_partitions}, "
        f"M = {values.num_micro_batches}, remat {values.remat}"
    )
    if path.suffix == ".png":
        save_picture(events, title, "Simulated: only tasks take time.", path)
        return
    trace = chrome_trace(events, {"title": title})
    write_text(str(path), json.dumps(trace, indent=1))
