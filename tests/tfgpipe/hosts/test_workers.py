"""Runs over several hosts: their bits, and what happens when one dies."""

import contextlib
import dataclasses
import json
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import mixed
import numpy as np
import pytest
import runs
from processes import ROOT, Process, Workers, train, until
from tiny import assert_close, assert_same, data, fit

import tfgpipe
from params import datasets
from tfgpipe.checkpoints import Folder
from tfgpipe.hosts import link
from tools import devices
from tools.train import comparison
from tools.train.trainer import Trainer

pytestmark = pytest.mark.xdist_group("workers")


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    made = Workers(tmp_path_factory.mktemp("workers"), 2)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(datasets.LOADERS, "noise", runs.noise)


def expected_weights(num_replicas=1, num_steps=None):
    """Those of a run in this process, with one cell: they are the same."""
    experiment = dataclasses.replace(runs.IMAGE, num_partitions=1)
    strategy = devices.strategy(num_replicas, experiment)
    trainer = Trainer(experiment, num_steps, strategy=strategy)
    trainer.fit(verbose=0)
    return trainer.model.get_weights()


def assert_same_weights(folder, expected):
    found = tfgpipe.load_model(str(folder / "final.keras"), num_partitions=1)
    difference = comparison.difference(found.get_weights(), expected)
    assert difference.num_different == 0


@pytest.mark.slow
def test_killed_worker_is_named_and_the_run_resumes_bit_identically(
    workers, tmp_path
):
    """Of three replicas, one is on the second worker."""
    folder = tmp_path / "run"
    flags = (
        workers.flag,
        "--num_partitions=1",
        "--num_replicas=3",
        "--steps=40",
        "--checkpoint_every=4",
        f"--train_dir={folder}",
    )
    run = train(tmp_path, *flags)
    until(lambda: checkpoints(folder), run)
    workers.kill(1)
    assert run.wait() == 3, run.output
    assert f"Lost worker 1 at 127.0.0.1:{workers.ports[1]}" in run.output
    assert "Start it again. The same command goes on" in run.output
    assert not (folder / "final.keras").exists()
    until(lambda: "is gone. Waiting" in workers.output(0))

    workers.restart(1)
    run = train(tmp_path, *flags)
    assert run.wait() == 0, run.output
    assert "Resuming after step" in run.output
    assert "session config" not in run.output
    for task, index in ((0, 0), (0, 1), (1, 0)):
        name = f"/job:worker/replica:0/task:{task}/device:CPU:{index}"
        assert name in run.output
    assert_same_weights(folder, expected_weights(3, 40))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_interleaved_replicas_on_workers_have_the_bits_of_one_process(
    workers, tmp_path
):
    """Four cells on the two devices of a worker, a worker for each replica.

    They are one pipeline of all micro-batches, also after they were saved.
    """
    program = str(ROOT / "tests" / "mixed.py")
    run = Process(tmp_path, "mixed", program, workers.flag, str(tmp_path))
    assert run.wait() == 0, run.output
    for task in (0, 1):
        for index in (0, 1):
            name = f"/job:worker/replica:0/task:{task}/device:CPU:{index}"
            assert run.output.count(name) == 2
    found = list(np.load(tmp_path / "numbers.npz").values())
    here = mixed.replicas()
    fit(here, *data())
    assert_same(found, mixed.numbers(here))
    one = mixed.one_pipeline()
    assert_close(found, mixed.numbers(one))
    mixed.assert_goes_on(tmp_path / "model.keras", one)


@pytest.mark.slow
def test_stopped_worker_is_named_after_a_minute(tmp_path):
    workers = Workers(tmp_path, 2)
    folder = tmp_path / "run"
    flags = "--num_replicas=2", "--steps=100000", "--checkpoint_every=50"
    try:
        run = train(tmp_path, workers.flag, *flags, f"--train_dir={folder}")
        until(lambda: checkpoints(folder), run)
        time.sleep(2 * link.BEAT)
        assert run.popen.poll() is None
        start = time.monotonic()
        workers.stop(0)
        assert run.wait() == 3, run.output
        assert 55 <= time.monotonic() - start < 90
    finally:
        workers.end()
    assert f"Lost worker 0 at 127.0.0.1:{workers.ports[0]}" in run.output
    assert "no sign of life for 60 s" in run.output


# Stops all threads of a process but the first, as long as this one lives.
HANG = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
for name in os.listdir(f"/proc/{sys.argv[1]}/task"):
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        if name != sys.argv[1] and libc.ptrace(request, int(name), None, None):
            sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
print("hangs", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def hanging(process):
    """Inside, only the first thread of a process runs, which is Python's."""
    words = [sys.executable, "-c", HANG, str(process)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as popen:
        try:
            if popen.stdout.readline() != "hangs\n":
                pytest.skip("the system lets no process stop another's threads")
            yield
        finally:
            popen.kill()


@pytest.mark.slow
def test_worker_whose_devices_hang_is_named_after_a_minute(tmp_path):
    """Its Python lives, and sends its beats."""
    workers = Workers(tmp_path, 2)
    folder = tmp_path / "run"
    flags = "--num_replicas=2", "--steps=100000", "--checkpoint_every=50"
    try:
        run = train(tmp_path, workers.flag, *flags, f"--train_dir={folder}")
        until(lambda: checkpoints(folder), run)
        start = time.monotonic()
        with hanging(workers.pid(1)):
            assert run.wait() == 3, run.output
        assert 55 <= time.monotonic() - start < 100
    finally:
        workers.end()
    assert f"Lost worker 1 at 127.0.0.1:{workers.ports[1]}" in run.output
    assert "devices have answered nothing for 60 s" in run.output


PHASES = ["connect", "trace", "train", "train"]


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_bit(workers, tmp_path):
    """Of a worker or the controller: connecting, tracing, training, saving."""
    rng = random.Random(0)
    expected = expected_weights(2, 100)
    flags = (
        workers.flag,
        "--num_replicas=2",
        "--steps=100",
        "--checkpoint_every=1",
        "--connect_timeout=20",
    )
    num_kills, codes = 0, []
    while num_kills < 20:
        folder = tmp_path / f"run{num_kills}"
        code = None
        while code != 0:
            run = train(tmp_path, *flags, f"--train_dir={folder}")
            if num_kills < 20:
                wait_for_phase(rng.choice(PHASES), run, folder)
            if num_kills < 20 and not run.ends_within(rng.uniform(0, 3)):
                num_kills += 1
                code = kill_one(rng.randrange(3), workers, run)
            else:
                code = run.wait()
                assert code == 0, run.output
            codes.append(code)
        assert_same_weights(folder, expected)
    assert {3, -signal.SIGKILL} <= set(codes)
    print(f"Exit codes: {codes}")


def wait_for_phase(phase, run, folder):
    """Waits until a run connects, traces or trains, or has ended."""
    before = checkpoints(folder)
    reached = {
        "connect": lambda: "tools.train: Connecting" in run.output,
        "trace": lambda: "Ideal bubble" in run.output,
        "train": lambda: checkpoints(folder) != before,
    }
    until(lambda: reached[phase]() or run.popen.poll() is not None)


def checkpoints(folder):
    return Folder(folder / "checkpoints").steps()


def kill_one(victim, workers, run):
    """Kills a worker, or for 2 the controller; returns its exit code."""
    if victim == 2:
        run.kill()
        return run.wait()
    workers.kill(victim)
    code = run.wait()  # bounded
    if code != 0:  # it may just have finished
        assert code == 3 or (code == 2 and "within 20 s" in run.output)
        address = f"worker {victim} at 127.0.0.1:{workers.ports[victim]}"
        assert address in run.output
    workers.restart(victim)
    return code


@pytest.mark.slow
def test_commands_of_the_page_do_as_it_says(workers, tmp_path):
    """Those of the chapter, at the workers' addresses, and for one step."""
    page = (ROOT / "docs" / "hosts.md").read_text("utf-8")
    page = page.replace("\\\n", " ")
    for index, port in enumerate(workers.ports):
        page = page.replace(f"host{index}:2222", f"127.0.0.1:{port}")
    chapter = page.split("## Start a run")[1].split("## Security")[0]
    (worker,) = re.findall(r"^tfgpipe worker (.*)$", chapter, re.MULTILINE)
    assert worker.split() == [
        "--port=2222",
        "--bind=host0",
        "--num_virtual_devices=2",
    ]
    commands = re.findall(r"^\.venv/bin/python (.*)$", chapter, re.MULTILINE)
    one, several = map(shlex.split, commands)
    folders = []
    for index, command in enumerate((one, several)):
        folders.append(tmp_path / str(index))
        flags = "--steps=1", f"--train_dir={folders[-1]}"
        run = Process(tmp_path, "train", *command, *flags)
        assert run.wait() == 0, run.output
    first = tfgpipe.load_model(str(folders[0] / "final.keras"))
    assert_same_weights(folders[1], first.get_weights())

    (example,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    names = "import numpy as np, tfgpipe\nfrom keras import layers as kl\n"
    run = Process(tmp_path, "example", "-c", names + example)
    assert run.wait() == 0, run.output


# ------------------------------------------------------------------ TF_CONFIG
def free_ports(count):
    found = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in found]
    for listener in found:
        listener.close()
    return ports


def cluster(tmp_path, jobs, *flags):
    """Two tasks with the same command: first the one that serves."""
    ports = free_ports(2)
    addresses = [f"localhost:{port}" for port in ports]
    tasks = [
        {"type": job, "index": jobs[:index].count(job)}
        for index, job in enumerate(jobs)
    ]
    named = {
        job: [a for a, own in zip(addresses, jobs) if own == job]
        for job in jobs
    }
    return ports, [
        train(
            tmp_path,
            *flags,
            TF_CONFIG=json.dumps({"cluster": named, "task": task}),
        )
        for task in reversed(tasks)
    ]


def output_of_controller(processes):
    """When both tasks of a cluster have ended as they should."""
    for process in processes:
        assert process.wait() == 0, process.output
    serving, controller = (process.output for process in processes)
    assert "controller ended with exit code 0" in serving
    return controller


@pytest.mark.slow
def test_hosts_with_tf_config_give_the_bits_of_one_and_end(tmp_path):
    """The chief is the controller, and has a cell as well."""
    folder = tmp_path / "run"
    jobs = ["chief", "worker"]
    _, processes = cluster(tmp_path, jobs, f"--train_dir={folder}")
    controller = output_of_controller(processes)
    assert "/job:chief/replica:0/task:0/device:CPU:0" in controller
    assert "/job:worker/replica:0/task:0/device:CPU:0" in controller
    assert_same_weights(folder, expected_weights())


@pytest.mark.slow
def test_cluster_whose_controller_is_killed_ends_and_resumes(tmp_path):
    folder = tmp_path / "run"
    jobs = ["worker", "worker"]  # the first is the controller
    flags = "--steps=40", "--checkpoint_every=4", f"--train_dir={folder}"
    ports, processes = cluster(tmp_path, jobs, *flags)
    serving, controller = processes
    until(lambda: checkpoints(folder), *processes)
    controller.kill()
    assert serving.wait() == 3
    name = f"The controller, worker 0 at localhost:{ports[0]}, is gone"
    assert name in serving.output
    assert "give the same command on every host" in serving.output
    assert not (folder / "final.keras").exists()

    _, processes = cluster(tmp_path, jobs, *flags)
    controller = output_of_controller(processes)
    assert "Resuming after step" in controller
    assert "/job:worker/replica:0/task:0/device:CPU:0" in controller
    assert "/job:worker/replica:0/task:1/device:CPU:0" in controller
    assert_same_weights(folder, expected_weights(num_steps=40))
