"""The timeline command: what it draws, prints and refuses."""

import csv
import doctest
import itertools
import json
import re

import keras
import numpy as np
import pytest

from params import datasets, registry
from params.experiment import Experiment
from params.images import Images
from params.optimizer import Optimizer
from tfgpipe import timeline as library
from tfgpipe.schedules.named import SCHEDULES
from tfgpipe.schedules.schedule import Task
from tfgpipe.timeline import Event, simulated
from tools import devices
from tools.bench import efficiency
from tools.timeline import __main__ as timeline
from tools.timeline import gantt, statistics
from tools.timeline import text as timeline_text
from tools.timeline.gantt_colors import LOOKS


def seconds(task):
    """Whole seconds, all different from a microsecond or a slot."""
    return 2.0 if task.kind == "backward" else 1.0


def events(name="gpipe", k=2, m=3, chunks=1, updates=False, remat=True):
    schedule = SCHEDULES[name](k, m, chunks)
    if remat:
        schedule = schedule.with_recompute(
            lambda cell, m: m == schedule.first_backward(cell)
        )
    made = simulated(schedule, seconds)
    ends = [max(e.end for e in made if e.device == d) for d in range(k)]
    for device, end in enumerate(ends if updates else []):
        made.append(Event(Task("update", device, -1), device, end, end + 1))
    return made


# ---------------------------------------------------------------- statistics
def test_numbers_are_those_of_the_schedule():
    made = events(k=4, m=8)
    schedule = statistics.schedule_of(made)
    assert simulated(schedule, seconds) == made
    assert statistics.length(made) == schedule.length(seconds)
    assert statistics.bubble(made) == pytest.approx(schedule.bubble(seconds))
    assert statistics.idle_shares(made) == pytest.approx([9 / 40] * 4)


def test_updates_are_in_no_number():
    for function in (
        statistics.length,
        statistics.bubble,
        statistics.schedule_of,
        statistics.idle_shares,
    ):
        assert function(events(updates=True)) == function(events())


def test_order_of_tasks_that_take_no_time_is_kept():
    schedule = SCHEDULES["zero_bubble"](2, 3)
    made = simulated(
        schedule, lambda task: float(task.kind != "input_gradient")
    )
    assert statistics.schedule_of(made) == schedule


def test_mean_duration_is_that_of_a_kind_in_a_cell():
    made = [
        Event(Task("forward", 0, 0), 0, 0.0, 1.0),
        Event(Task("forward", 0, 1), 0, 2.0, 5.0),
        Event(Task("forward", 1, 0), 1, 2.0, 9.0),
    ]
    duration = statistics.mean_durations(made)
    assert duration(Task("forward", 0, 1)) == 2
    assert duration(Task("forward", 1, 1)) == 7


# ---------------------------------------------------------------------- text
def test_text_of_a_small_schedule_has_a_letter_a_task_time():
    assert timeline_text.text(events()) == "\n".join(
        [
            "device 0  FFF...BBRBBRBB",
            "device 1  .FFFBBRBBRBB..",
            "          0       14.0 s",
            "",
            "F forward   R recompute   B backward   . idle   "
            "one letter: 1,000 ms",
        ]
    )


def test_text_shows_chunks_and_gradients_and_updates():
    rows = timeline_text.text(events("interleaved", 2, 2, 2)).splitlines()
    assert rows[0] == "device 0  FFff..bbr.bbBBRBB"
    assert rows[-1].endswith("small letters: every second cell of a device")
    rows = timeline_text.text(events("zero_bubble", updates=True, remat=False))
    letters = set("".join(row[10:] for row in rows.splitlines()[:2]))
    assert letters == set("FIWU.")


@pytest.mark.parametrize(
    ("k", "m", "chunks"), [(8, 32, 1), (16, 64, 1), (8, 32, 2), (1, 1, 1)]
)
def test_text_fits_100_columns_and_shows_each_kind_by_its_share(k, m, chunks):
    made = events("interleaved", k, m, chunks, updates=True)
    lines = timeline_text.text(made).splitlines()
    assert max(map(len, lines)) <= 100
    total = max(event.end for event in made)
    for device in range(k):
        row = lines[device].split()[-1].upper()
        for kind, letter in timeline_text.LETTERS.items():
            time = sum(
                event.end - event.start
                for event in made
                if event.device == device and event.task.kind == kind
            )
            assert abs(row.count(letter) - time / total * len(row)) <= 2


def test_text_of_uneven_times_uses_the_whole_width():
    made = [
        Event(task, device, start * 1.07, end * 1.07 - start % 0.13)
        for task, device, start, end in events()
    ]
    lines = timeline_text.text(made, width=60).splitlines()
    assert len(lines[0]) == 60
    assert max(map(len, lines)) <= 60


def test_examples_in_the_docstrings_run():
    assert doctest.testmod(timeline_text).failed == 0


# -------------------------------------------------------------- Chrome trace
def test_chrome_trace_has_an_event_a_task_on_the_devices_thread():
    made = events(updates=True)
    trace = timeline_text.chrome_trace(made, {"title": "a step"})
    trace = json.loads(json.dumps(trace))
    assert trace["otherData"] == {"title": "a step"}
    boxes = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(boxes) == len(made)
    assert all(box["cname"] for box in boxes)
    (box,) = (b for b in boxes if b["name"] == "backward 2" and b["tid"] == 1)
    assert (box["ts"], box["dur"]) == (4e6, 2e6)
    assert box["args"] == {"cell": 1, "micro_batch": 2}
    names = {
        e["tid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert names == {0: "device 0", 1: "device 1"}


# ------------------------------------------------------------------ pictures
def drawn(made, tmp_path, name="a", **caption):
    paths = [tmp_path / f"{name}.{end}" for end in ("svg", "png")]
    gantt.save(made, gantt.Caption("1f1b: K = 2", **caption), paths)
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture_has_a_box_a_task(name, tmp_path):
    made = events(name, updates=True)
    svg = drawn(made, tmp_path)[0].decode()
    boxes = re.findall(r'<g id="([a-z_]+-\d+-[-\d]+)"', svg)
    expected = [f"{t.kind}-{t.cell}-{t.micro_batch}" for t, *_ in made]
    assert sorted(boxes) == sorted(expected)


def texts(svg):
    """What is written, in the comments beside the shapes of the letters."""
    return re.findall(r"<!-- (.*) -->", svg.decode())


def test_picture_says_what_it_shows(tmp_path):
    made = events("interleaved", 2, 4, 2, updates=True)
    svg, png = drawn(made, tmp_path, subtitle="bubble 1%", ideal=9.0)
    found = texts(svg)
    for text in (
        "1f1b: K = 2",
        "bubble 1%",
        "ideal end",
        "device 1",
        "time (s)",
        "recompute",
        "backward",
        "update",
        "cells 0 to 1",
        "cells 2 to 3",
    ):
        assert text in found
    # Each of the two cells: forward, recomputed once less, backward.
    assert found.count("3") == 2 * (2 + 2 + 2)
    assert png.startswith(b"\x89PNG")


def test_numbers_that_do_not_fit_are_left_out(tmp_path):
    made = events("gpipe", 1, 300, remat=False)
    assert "299" not in texts(drawn(made, tmp_path)[0])
    assert "299" in texts(drawn(made[290:310], tmp_path)[0])


def test_equal_events_give_equal_files(tmp_path, monkeypatch):
    first = drawn(events(), tmp_path)
    monkeypatch.setitem(gantt.matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(gantt.matplotlib.rcParams, "axes.grid", True)
    assert drawn(events(), tmp_path, name="b") == first


def luminance(color):
    red, green, blue = (part**2.2 for part in color)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * light ** (1 / 3) - 16


@pytest.mark.parametrize(
    ("kinds", "last"),
    [
        (("forward", "backward"), 0),
        (("forward", "backward"), 1),  # two cells a device
        (("forward", "input_gradient", "weight_gradient"), 0),
    ],
)
def test_colors_differ_in_greyscale(kinds, last):
    shades = [luminance(LOOKS["update"].color(0, last)), 100]
    for kind, place in itertools.product(kinds, range(last + 1)):
        shades.append(luminance(LOOKS[kind].color(place, last)))
    shades.sort()
    assert min(b - a for a, b in itertools.pairwise(shades)) > 10
    # Recomputations have lower boxes instead.
    assert LOOKS["recompute"].height < 0.6 * LOOKS["forward"].height


# ------------------------------------------------------------------- command
class Perceptron:
    def layers(self):
        return [
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(3, "softmax", name="classes"),
        ]


@pytest.fixture
def measured(monkeypatch):
    """A tiny experiment; steps take half as long again as they should."""
    calls = []

    def measure(model, x, y, **kwargs):
        calls.append((model, np.shape(x), np.shape(y)))
        tasks = SCHEDULES["1f1b"](2, model.num_micro_batches)
        made = simulated(tasks, lambda task: seconds(task) / 100)
        return [Event(t, d, 1.5 * a, 0.5 * a + b) for t, d, a, b in made]

    monkeypatch.setattr(library, "measure", measure, raising=False)
    monkeypatch.setattr(efficiency, "make_devices", lambda *_: None)
    monkeypatch.setattr(devices, "split_cpu", lambda num_devices: None)
    x = np.zeros((6, 4, 4, 1), np.float32)
    y = np.zeros(6, np.int32)
    data = datasets.ImageDataset(x, y, x, y)
    monkeypatch.setitem(datasets.LOADERS, "zeros", lambda: data)
    experiment = Experiment(
        name="image.tiny",
        description="two layers",
        model=Perceptron(),
        data=Images("zeros"),
        optimizer=Optimizer("sgd", 0.1),
        batch_size=6,
        epochs=1,
        num_partitions=2,
        num_micro_batches=3,
    )
    monkeypatch.setitem(registry._EXPERIMENTS, experiment.name, experiment)
    return calls


def run(*words):
    return timeline.main(["timeline", *words])


def test_simulation_prints_letters_and_writes_three_files(tmp_path, capsys):
    output = tmp_path / "new" / "one"
    assert run("--simulate", "--k=2", "--m=3", f"--output={output}") == 0
    out = capsys.readouterr().out
    assert "gpipe: K = 2, M = 3, remat except_last" in out
    assert "cells of 20 ms, simulated: bubble 21.4%" in out
    assert "device 1  .FFFBBRBBRBB.." in out
    for end in ("png", "svg", "json"):
        path = output.with_suffix(f".{end}")
        assert path.stat().st_size and str(path) in out
    trace = json.loads(output.with_suffix(".json").read_text())
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 16


def test_folder_as_output_gets_the_files(tmp_path):
    assert run("--simulate", "--k=1", "--m=1", f"--output={tmp_path}") == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "timeline.png",
        "timeline.svg",
        "timeline.json",
    }


def test_chunks_are_cells_of_a_device(capsys):
    words = "--simulate --k=2 --m=2 --schedule=interleaved --output="
    assert run(*words.split()) == 0
    out = capsys.readouterr().out
    assert "interleaved: K = 2 devices x 2 cells, M = 2" in out
    assert "Wrote" not in out


def test_json_has_the_measured_and_the_ideal_numbers(measured, capsys):
    words = "--k=2 --m=4 --schedule=1f1b --remat=never --output="
    assert run(*words.split(), "--forward_ms=10", "--format=json") == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    (step,), tasks = (table["rows"] for table in tables)
    # The last task starts 1.5 times too late.
    assert step["ideal_ms"] == pytest.approx(150)
    assert step["length_ms"] == pytest.approx(1.5 * 130 + 20)
    assert step["ideal_bubble"] == pytest.approx(0.2)
    assert step["bubble"] == pytest.approx(1 - 120 / 215, rel=1e-5)
    assert step["ratio"] == pytest.approx(215 / 150, rel=1e-5)
    assert [row["count"] for row in tasks] == [8, 8]
    ((model, x, y),) = measured
    assert (model.num_partitions, x, y) == (2, (4, 1), (4, 1))


def test_csv_keeps_other_lines_out(measured, tmp_path, capsys):
    words = "--k=2 --m=2 --schedule=1f1b --format=csv".split()
    assert run(*words, f"--output={tmp_path}/a") == 0
    captured = capsys.readouterr()
    rows = list(csv.DictReader(captured.out.splitlines()))
    assert [row["table"] for row in rows] == ["step", "tasks", "tasks"]
    assert captured.err.startswith("Wrote ")


def test_experiment_is_measured_on_one_mini_batch(measured, capsys):
    words = "--params=image.tiny --m=2 --set=batch_size=4 --output="
    assert run(*words.split()) == 0
    out = capsys.readouterr().out
    assert "gpipe: K = 2, M = 2" in out
    assert re.search(r"image.tiny: bubble \S+% measured, \S+% ideal;", out)
    ((model, x, y),) = measured
    assert (model.num_micro_batches, x, y) == (2, (4, 4, 4, 1), (4,))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--k=0", "--k=0"),
        ("--k=two", "--k=two"),
        ("--forward_ms=0", "--forward_ms=0"),
        ("--schedule=gpip", "<gpipe|1f1b|interleaved|zero_bubble>"),
        ("--remat=maybe", "<except_last|always|never>"),
        ("--format=xml", "<text|json|csv>"),
        ("--chunks=2", "Unknown command line flag 'chunks'"),
        ("--num_chunks=2", "must be 1 unless --schedule=interleaved"),
        ("k=2", "only flags. Received: ['k=2']"),
        ("--set=epochs=1", "it needs --params"),
        ("--params=image.tinny", "Did you mean 'image.tiny'"),
        ("--params=image.tiny --k=3", "num_partitions=3"),
        ("--params=image.tiny --m=7", "at most `batch_size`"),
        ("--params=image.tiny --simulate", "must not be given both"),
        ("--params=image.tiny --forward_ms=2", "--forward_ms and --params"),
        ("--simulate --output=/dev/null/a", "--output=/dev/null/a, which"),
    ],
)
def test_bad_flags_are_refused(words, message, measured, tmp_path, capsys):
    folder = tmp_path / "new"
    assert run(f"--output={folder}/", *words.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("tools.timeline: ")
    assert captured.out == ""
    assert not measured and not folder.exists()


def test_missing_matplotlib_is_told(monkeypatch, capsys):
    monkeypatch.setattr(timeline.importlib.util, "find_spec", lambda _: None)
    assert run("--simulate") == 2
    assert "pip install '.[tools]'" in capsys.readouterr().err
    assert run("--simulate", "--output=") == 0


def test_help_says_what_the_command_does(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "python -m tools.timeline" in out and "--num_chunks" in out
