r"""Draws when each task of a training step runs, and on which device.

    python -m tools.timeline --k=4 --m=8 --schedule=1f1b
    python -m tools.timeline --k=8 --m=32 --schedule=zero_bubble --simulate
    python -m tools.timeline --params=image.amoebanet_d_demo --k=2 \
        --set=batch_size=32 --output=pictures/demo

Without --params, every cell is one layer that waits instead of computing: as
long forward as for the gradient of its input and for that of its weight. So any
number of devices can be shown on any machine.

It prints the tasks of each device, and the bubble beside the ideal one, that
is, if nothing but the tasks takes time. It writes pictures,
OUTPUT.png and OUTPUT.svg, and OUTPUT.json for chrome://tracing or
https://ui.perfetto.dev.
"""

import importlib.util
import json
import os
import pathlib
import sys

from absl import flags

from tfgpipe import timeline
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import BadFlags, doing
from tfgpipe.files import write_text
from tfgpipe.monitor import chrome_trace
from tfgpipe.schedules import KINDS, REMAT, SCHEDULES
from tfgpipe.timeline import Event
from tools.flags import define
from tools.report import (
    Report,
    Table,
    columns,
    environment,
    spread,
    spread_values,
)
from tools.timeline import runs
from tools.timeline.runs import Run

FLAGS = command_line.new_flags()
define(
    FLAGS,
    k=(int, "Devices. Default: 4."),
    m=(int, "Micro-batches. Default: 8."),
    schedule=(
        str,
        "Order of the tasks on each device. Default: gpipe.",
        SCHEDULES,
    ),
    remat=(
        str,
        "What the backward pass recomputes. Default: except_last.",
        REMAT,
    ),
    num_chunks=(int, "Cells of a device, if interleaved. Default: 2."),
    forward_ms=(
        float,
        "Milliseconds of a cell's forward task. Default: 20.",
        0.01,
    ),
    params=(
        str,
        "An experiment to run instead of waiting cells, by its name.",
    ),
)
flags.DEFINE_multi_string(
    "set",
    [],
    "Another field of the experiment: --set=batch_size=32.",
    flag_values=FLAGS,
)
define(
    FLAGS,
    simulate=(False, "Draw the schedule, run nothing."),
    output=(
        "timeline",
        "How the files' names begin, or a folder for them. Empty: no files.",
    ),
    format=(
        "text",
        "How to print the numbers; the tasks come with text only.",
        ["text", "json", "csv"],
    ),
)


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.timeline", FLAGS, __doc__, _draw, argv)


def _draw(values: flags.FlagValues) -> None:
    run = runs.prepare(values)
    output = _output(values.output)
    with doing("running the step"):
        events = run.measure()
    ideal = run.ideal(events)
    _print(run, events, ideal, values.format)
    if output:
        made = _write(run, events, ideal, output)
        # Not among numbers that a program may read.
        where = sys.stdout if values.format == "text" else sys.stderr
        print(f"Wrote {', '.join(map(str, made))}.", file=where)


def _output(text: str) -> pathlib.Path | None:
    """What the files' names begin with; makes the folder."""
    if not text:
        return None
    if not importlib.util.find_spec("matplotlib"):
        raise BadFlags(
            "--output draws with matplotlib, which is not installed. Install "
            "it with `pip install '.[tools]'`, or give an empty --output=."
        )
    path = pathlib.Path(text)
    if text.endswith(os.sep) or path.is_dir():
        path = path / "timeline"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.png", "ab"):  # before there is work to lose
            pass
    except OSError as error:
        raise BadFlags(
            "--output must begin with a folder that can be written to. "
            f"Received: --output={text}, which gives: {error}."
        ) from error
    return path


def _write(
    run: Run, events: list[Event], ideal: list[Event], output: pathlib.Path
) -> list[pathlib.Path]:
    """Writes the files; returns their paths."""
    # not needed, nor installed perhaps, without files
    from tfgpipe.monitor.drawing import timeline_picture

    paths = [pathlib.Path(f"{output}.{end}") for end in ("png", "svg", "json")]
    numbers = _sentence(run, events, ideal)
    end = None if run.is_simulated else timeline.length(ideal)
    timeline_picture(events, run.title, numbers, end).save(*paths[:2])
    about = {"title": run.title, "numbers": numbers, **environment()}
    trace = chrome_trace(events, about)
    write_text(paths[2], json.dumps(trace, indent=1))
    return paths


def _sentence(run: Run, events: list[Event], ideal: list[Event]) -> str:
    """The numbers that matter most."""
    bubble, length = timeline.bubble(events), timeline.length(events)
    if run.is_simulated:
        return (
            f"{run.what}, simulated: bubble {bubble:.1%}; "
            f"the tasks take {timeline.seconds(length)}"
        )
    best = timeline.length(ideal)
    return (
        f"{run.what}: bubble {bubble:.1%} measured, "
        f"{timeline.bubble(ideal):.1%} ideal; the tasks take "
        f"{timeline.seconds(length)}, {length / best:.3f} times the ideal "
        f"{timeline.seconds(best)}"
    )


# ------------------------------------------------------------------- numbers
_STEP_COLUMNS = columns(
    "schedule | remat | k: K | m: M | length_ms: tasks ms: .1f | "
    "ideal_ms: ideal ms: .1f | ratio: ratio: .3f | bubble: bubble: .1% | "
    "ideal_bubble: ideal bubble: .1%"
)
_TASK_COLUMNS = columns("kind: task | count | *ms: ms: .2f")


def _print(
    run: Run, events: list[Event], ideal: list[Event], style: str
) -> None:
    """Prints numbers, and tasks if the format is text."""
    report = Report("timeline", style)
    report.add(_step_table(run, events, ideal))
    report.add(_task_table(events))
    if style != "text" or not run.is_simulated:
        report.print()
    if style == "text":
        print(f"\n{run.title}\n{_sentence(run, events, ideal)}\n")
        print(timeline.program_of(events))


def _step_table(run: Run, events: list[Event], ideal: list[Event]) -> Table:
    length, best = timeline.length(events), timeline.length(ideal)
    row = {
        "run": run.what,
        "is_simulated": run.is_simulated,
        **run.settings,
        "length_ms": 1000 * length,
        "ideal_ms": 1000 * best,
        "ratio": length / best,
        "bubble": timeline.bubble(events),
        "ideal_bubble": timeline.bubble(ideal),
    }
    notes = ["Without the updates of the weights, which no schedule has."]
    title = f"The tasks of a step, {run.what}"
    return Table("step", title, _STEP_COLUMNS, [row], notes)


def _task_table(events: list[Event]) -> Table:
    rows = []
    for kind in (*KINDS, "update"):
        times = [e.end - e.start for e in events if e.task.kind == kind]
        if times:
            values = spread_values("ms", spread(times).times(1000))
            rows.append({"kind": kind, "count": len(times), **values})
    title = "Durations of single tasks: median and quartiles"
    return Table("tasks", title, _TASK_COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
