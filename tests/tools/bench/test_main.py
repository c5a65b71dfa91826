"""The benchmarks: their flags, their tables, and each of them at a tiny size.

No test says anything about how long something takes.
"""

import csv
import doctest
import importlib
import io
import json
import os
import pathlib
import signal
import threading
import time

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
from absl import flags

import tfgpipe
from tools import devices
from tools import report as bench_report
from tools.bench import __main__ as bench
from tools.bench import (
    efficiency,
    models,
    peer_worker,
    replica_worker,
    replicas,
    throughput_worker,
    timed_layers,
)
from tools.bench import overhead as bench_overhead
from tools.bench.flags import define_choices, define_numbers, new_flags
from tools.bench.models import BenchModel
from tools.bench.sleeping_layers import Sleeping
from tools.bench.timed_layers import Device, Timed
from tools.report import Column, Report, Table, spread

TINY = BenchModel(
    "two layers",
    lambda: [keras.layers.Dense(3, "relu"), keras.layers.Dense(2)],
    (4,),
    (2,),
    "mse",
    8,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A tiny model; leaves the tests' devices and cores alone."""
    monkeypatch.setitem(models.MODELS, "transformer", TINY)
    monkeypatch.setattr(efficiency, "make_devices", lambda *_: None)
    monkeypatch.setattr(bench_overhead, "make_devices", lambda *_: None)
    monkeypatch.setattr(replicas, "make_devices", lambda *_: None)
    monkeypatch.setattr(devices, "split_cpu", lambda num_devices: None)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: None, raising=False
    )


def run(*words):
    return bench.main(["bench", *words])


def tables(capsys, *words):
    """The rows of each table that a command prints as JSON."""
    assert run(*words, "--format=json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["command"] == words[0]
    return {table["name"]: table["rows"] for table in made["tables"]}


# -------------------------------------------------------------- command line
@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_lists_the_commands(word, capsys):
    assert run(word) == 0
    shown = capsys.readouterr().out
    for name, what in bench.COMMANDS.items():
        assert name in shown and what in shown


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_help_of_a_command_lists_its_flags(name, capsys):
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    module = importlib.import_module(f"tools.bench.{name}")
    assert module.__doc__ in shown
    assert f"Usage: python -m tools.bench {name}" in shown
    for flag in module.FLAGS:
        if flag not in ("h", "help"):
            assert f"{flag}:" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "must be a sub-command: one of efficiency, throughput"),
        (["efficency"], "Did you mean 'efficiency'?"),
        (["--k=2"], "must be a sub-command"),
        (["efficiency", "fast"], "only flags. Received: ['fast']"),
        (["efficiency", "--round=3"], "Did you mean: rounds"),
        (["efficiency", "--rounds=0"], "not a positive integer"),
        (["efficiency", "--format=xml"], "should be one of <text|json|csv>"),
        (["efficiency", "--k=2,x"], "integers with commas"),
        (["efficiency", "--k=0"], "each at least 1. Received: '0'"),
        (["efficiency", "--cell_ms=-1"], "numbers with commas"),
        (["efficiency", "--m=4x"], "such as 4k"),
        (["efficiency", "--m=0"], "Received: '0'"),
        (["efficiency", "--schedule=1f2b"], "of which unknown: ['1f2b']"),
        (
            ["replicas", "--part=processes", "--processes=5"],
            "a number above 1 that divides R K. Received: --processes=[5]",
        ),
        (["throughput", "--k=4096"], "at most the number of cores"),
        (["throughput", "--k=1", "--m=9"], "at most --batch_size, 8"),
        (["overhead", "--dispatch_m=4"], "two numbers or more"),
    ],
)
def test_bad_flags_fail_before_any_work(words, message, capsys):
    words = [*words, "--model=transformer"] if "throughput" in words else words
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_interrupted_run_prints_what_it_has(monkeypatch, capsys):
    def measure(setting, rounds):
        if setting.m > 1:
            raise KeyboardInterrupt
        return 1.0, [0.1] * rounds

    monkeypatch.setattr(efficiency, "measure", measure)
    words = ["--k=2", "--m=1,2", "--schedule=gpipe", "--cells=equal"]
    assert run("efficiency", "--cell_ms=1", *words) == 130
    captured = capsys.readouterr()
    assert "gpipe" in captured.out
    assert "interrupted" in captured.err


def test_lists_can_be_given_by_name_and_number():
    values = new_flags(rounds=3)
    define_numbers(values, "size", [1.5], "Sizes.", 0, float)
    define_choices(values, "color", ["red"], ["red", "blue"], "Colors.")
    values(["program"])
    assert (values.rounds, values.size, values.color) == (3, [1.5], ["red"])
    values(["program", "--size=0,2", "--color=blue,red"])
    assert (values.size, values.color) == ([0, 2], ["blue", "red"])
    with pytest.raises(flags.IllegalFlagValueError):
        values(["program", "--color="])


# -------------------------------------------------------------------- tables
def report(style):
    made = Report("test", style)
    columns = [Column("what", "what"), Column("ms", "time", ".1f")]
    rows = [{"what": "a", "ms": 1 / 3}, {"what": "long", "extra": 7}]
    made.add(Table("first", "The first table", columns, rows, ["A note."]))
    made.add(Table("second", "Second", columns, [{"ms": 12.34, "what": "b"}]))
    made.add(Table("empty", "Has no rows", columns))
    made.print()


def test_text_aligns_columns_and_shows_the_machine(capsys):
    report("text")
    shown = capsys.readouterr().out
    for name in ("tensorflow", "keras", "machine", "cores"):
        assert f"\n{name} " in f"\n{shown}"
    assert keras.__version__ in shown
    first = "what  time\n----  ----\na      0.3\nlong     -\nA note."
    assert f"The first table\n\n{first}\n" in shown
    assert "12.3" in shown
    assert "Has no rows" not in shown


def test_json_has_all_values(capsys):
    report("json")
    made = json.loads(capsys.readouterr().out)
    assert made["environment"]["keras"] == keras.__version__
    assert made["tables"][0]["rows"] == [
        {"what": "a", "ms": 0.333333},
        {"what": "long", "extra": 7},
    ]
    assert made["tables"][0]["notes"] == ["A note."]


def test_csv_is_one_table(capsys):
    report("csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["table"] for row in rows] == ["first", "first", "second"]
    assert [row["ms"] for row in rows] == ["0.333333", "", "12.34"]
    assert [row["extra"] for row in rows] == ["", "7", ""]
    assert {row["keras"] for row in rows} == {keras.__version__}


def test_spread_of_one_measurement_is_that():
    assert spread([2.0]) == (2.0, 2.0, 2.0)
    assert spread([1.0, 2.0]).times(10) == (15, 12.5, 17.5)


def test_no_progress_bar_without_a_terminal(capsys):
    assert list(bench_report.progress(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


# -------------------------------------------------------------- timed layers
def test_device_does_one_thing_at_a_time():
    device = Device()
    both = [
        threading.Thread(target=device.work, args=(0.01,)) for _ in range(2)
    ]
    start = time.perf_counter()
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert time.perf_counter() - start >= 0.02  # sleep is never too short


class Counter(Device):
    """Counts what it is asked for."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def work(self, seconds):
        self.calls += 1


@pytest.mark.parametrize(
    ("remat", "num_forward"), [("always", 6), ("except_last", 5), ("never", 3)]
)
def test_timed_layers_wait_for_every_task(remat, num_forward):
    devices = [Counter(), Counter()]
    layers = [Timed(d, 0.001, i == 0) for i, d in enumerate(devices)]
    model = tfgpipe.GPipe(layers, 2, 3, devices=["CPU:0", "CPU:1"], remat=remat)
    model.compile("sgd", "mse")
    rows = np.ones((3, 2), np.float32)
    model.train_on_batch(rows, rows)
    # Besides, one gradient of the inputs and one of the weight.
    assert [d.calls for d in devices] == [num_forward + 2 * 3] * 2


def test_timed_layers_return_what_they_get():
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    layer = Timed(Device(), 0.0, is_first=True)
    np.testing.assert_array_equal(layer(x), x)


# ------------------------------------------------------------ the benchmarks
def test_efficiency_measures_every_setting(capsys):
    rows = tables(
        capsys,
        "efficiency",
        "--k=2",
        "--m=k,1k,3",
        "--cell_ms=1",
        "--rounds=1",
        "--schedule=gpipe",
        "--cells=equal,uneven",
        "--remat=except_last",
    )["efficiency"]
    assert [(r["m"], r["cells"]) for r in rows] == [
        (m, cells) for m in (2, 3) for cells in ("equal", "uneven")
    ]
    # Fill-drain: 4 M - 1 tasks of the last cell, and 3 on the way to it.
    assert rows[0]["bound_ms"] == pytest.approx(4 * 2 - 1 + 3)
    assert rows[0]["bound_ms"] < rows[1]["bound_ms"]
    assert all(r["ratio"] > 0 and r["net_ratio"] > 0 for r in rows)


def test_replicas_are_timed_and_their_variables_counted(capsys):
    found = tables(
        capsys,
        "replicas",
        "--r=1,2",
        "--k=2",
        "--m=3",
        "--cell_ms=1",
        "--exchange_ms=1",
        "--rounds=1",
    )
    speed, memory = found["speed"], found["memory"]
    assert [r["bound_ms"] for r in speed] == pytest.approx([14, 14])
    for row in speed:
        assert 0 < row["efficiency"] <= 1
        assert 0 <= row["hidden"] <= 1
        assert row["step_ms"] > row["bound_ms"]
    one, two = memory
    # 4 blocks of 4 * 64 * 64 + 2 * 64 * 256 weights and 13 vectors, and slots
    block = 4 * (64 * 65) + 256 * 65 + 64 * 257 + 4 * 64
    assert one["owned_mib"] == pytest.approx(4 * 3 * 4 * block / 2**20, 1e-3)
    assert two["owned_mib"] == pytest.approx(one["owned_mib"] / 2, 0.01)
    assert one["exchanged_mib"] == 0
    # half of the weights come in, gradients of as many go out
    assert two["exchanged_mib"] == pytest.approx(4 * 4 * block / 2**20, 0.01)


def test_replicas_in_processes_take_turns_with_one_process(monkeypatch, capsys):
    jobs = []

    class Worker:
        """A second for each process."""

        is_starting = False
        ready = {"exchanged_mib": 2.0, "first_step": 3.0}  # noqa: RUF012

        def __init__(self, command, environment):
            self.job = replica_worker.Job(**json.loads(command[-1]))
            self.steps = []
            jobs.append(self.job)

        def wait(self, seconds):
            return True

        def step(self):
            seconds = float(self.job.processes)
            self.steps.append(peer_worker.Step(seconds, others=0.0))

        def close(self):
            jobs.remove(self.job)

    monkeypatch.setattr(peer_worker, "Worker", Worker)
    words = ["--part=processes", "--r=2", "--k=1,3", "--m=3", "--cell_ms=100"]
    found = tables(capsys, "replicas", *words, "--processes=2,3")["processes"]
    shown = [(r["k"], r["processes"], r["more_ms"]) for r in found]
    # two devices, which three processes cannot share; and six
    assert shown == [
        (1, 1, 0),
        (1, 2, 1e3),
        (3, 1, 0),
        (3, 2, 1e3),
        (3, 3, 2e3),
    ]
    # 4 M - 1 tasks of the last cell, and 3 on the way to it and back
    assert found[0]["bound_ms"] == 1100
    assert found[3]["efficiency"] == pytest.approx((11 + 2 * 3) / 20)
    assert jobs == []


def test_sleeping_layers_wait_and_return_what_they_get():
    layers = [Sleeping(0.02, [3, 2], is_first=i == 0) for i in range(2)]
    model = tfgpipe.GPipe(
        layers, 2, 3, devices=["CPU:0", "CPU:1"], layers_per_cell=[1, 1]
    )
    model.compile("sgd", "mse")
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    with pytest.warns(UserWarning, match="DatasetToSingleElement"):
        outputs = model.predict(x, verbose=0)
    np.testing.assert_array_equal(outputs, x)
    with pytest.warns(UserWarning, match="DatasetToSingleElement"):
        model.train_on_batch(x, x)
    start = time.perf_counter()
    assert model.train_on_batch(x, x) == 0
    # as above: 4 * 3 - 1 tasks, and 3
    assert time.perf_counter() - start >= 14 * 0.02


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [None, signal.SIGINT, signal.SIGKILL])
def test_processes_of_replicas_end_in_every_case(signal_, tmp_path):
    """When it is done, is interrupted, or killed."""
    words = "replicas --part=processes --r=2 --k=1 --m=2 --cell_ms=5".split()
    words += ["--rounds=3" if signal_ is None else "--rounds=1000000"]
    # A shell's background jobs, and what they start, ignore Ctrl-C.
    code = (
        "import signal, sys; from tools import bench; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(bench.main(['bench', *sys.argv[1:]]))"
    )
    run = processes.Process(
        tmp_path, "bench", "-c", code, *words, "--format=json"
    )
    children = set()

    def has_workers():
        children.update(peer_worker._descendants(run.popen.pid))
        return sum("tools.worker" in command(pid) for pid in children) == 2

    try:
        processes.until(has_workers, run)
        if signal_ is not None:
            run.popen.send_signal(signal_)
        code = run.wait()
    finally:
        run.kill()
    assert code == {None: 0, signal.SIGINT: 130}.get(signal_, -9), run.output
    processes.until(lambda: not any(map(command, children)))
    if signal_ is None:
        (table,) = json.loads(run.output)["tables"]
        one, two = table["rows"]
        assert 0 < two["efficiency"] < 1 and 0 < one["efficiency"] < 1
        assert one["exchanged_mib"] == two["exchanged_mib"] > 0


def command(pid):
    """What a process runs; nothing once it has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_row_says_whose_device_works():
    timed = [Device(), Device()]
    taken = []
    for index, device in enumerate(timed):
        device.work = lambda seconds, index=index: taken.append(index)
    layer = Timed(timed, 0.001)
    for row in (1.0, 0.0, 1.0):
        layer(tf.constant([[row]]))
    assert taken == [1, 0, 1]


@pytest.mark.parametrize("name", efficiency.SCHEDULES)
def test_bound_of_uneven_cells_is_that_of_the_slowest_at_least(name):
    for cells, slowest in (("equal", 1), ("uneven", 2)):
        chunks = 2 if name == "interleaved" else 1
        setting = efficiency.Setting(name, "never", cells, 1, 4, 32, chunks)
        duration = timed_layers.durations(setting.seconds())
        work = 3 * 32 * slowest / chunks if chunks == 1 else 3 * 32
        assert setting.tasks().length(duration) > work / 1000


def test_throughput_is_relative_to_one_cell(monkeypatch, capsys):
    class Worker:
        """Four times faster with two cells and two micro-batches."""

        is_starting = False

        def __init__(self, command, environment):
            job = throughput_worker.Job(**json.loads(command[-1]))
            self.steps, self._seconds = [], 0.1 / job.k / job.m

        def wait(self, seconds):
            return True

        def step(self):
            self.steps.append(peer_worker.Step(self._seconds, others=0.0))

        def close(self):
            pass

    monkeypatch.setattr(peer_worker, "Worker", Worker)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {0, 1}, raising=False
    )
    words = ["--model=transformer", "--k=1,2", "--m=2", "--rounds=2"]
    found = tables(capsys, "throughput", *words)["throughput_transformer"]
    shown = [(r["k"], r["m"], r["speedup"], r["fraction"]) for r in found]
    assert shown == [(1, 1, 1, 1), (1, 2, 2, 2), (2, 2, 4, 3)]
    assert [r["speedup_same_m"] for r in found] == [1, 1, 2]


def test_throughput_worker_steps_when_asked(monkeypatch, capsys):
    job = throughput_worker.Job("transformer", "gpipe", "always", 2, 2, 1, 4)
    monkeypatch.setattr("sys.stdin", io.StringIO("step\nstep\nquit\nstep\n"))
    throughput_worker.main(["worker", job.command()[-1]])
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["READY", "T", "T"]


def overhead(capsys, *parts):
    """The tables of small models."""
    return tables(
        capsys,
        "overhead",
        f"--part={','.join(parts)}",
        "--rounds=2",
        "--model=transformer",
        "--dispatch_k=2",
        "--dispatch_m=1,2",
        "--l=2",
        "--k=1,2,3",
        "--m=2",
    )


@pytest.mark.slow
def test_overhead_measures_steps(capsys):
    (step,) = overhead(capsys, "step")["step"]
    assert step["ratio"] > 0


def test_overhead_measures_dispatch_and_tracing(capsys):
    found = overhead(capsys, "dispatch", "tracing")
    pipeline, calls = found["dispatch"]
    assert (pipeline["fewest"], pipeline["most"]) == (4, 8)
    assert calls["what"] == "empty function calls"
    # Three cells need three layers.
    assert [(r["l"], r["k"], r["num_tasks"]) for r in found["tracing"]] == [
        (2, 1, 4),
        (2, 2, 8),
    ]


@pytest.mark.parametrize("module", [bench_report, timed_layers])
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
