"""Replicas in worker processes."""

import json
import pathlib
import signal
import socket
import time

import processes
import pytest

from tfgpipe.hosts import controller
from tools.bench import __main__ as bench
from tools.bench import replica_worker, step_worker
from tools.bench.delayed_links import DelayedCluster, DelayedLinks


@pytest.fixture
def workers(use_workers):
    """Workers that are none.

    A step takes a second for each process, and one for a transfer of which the
    schedule was not told.
    """

    def seconds(job):
        return float(job.processes) + bool(job.link_ms and not job.share)

    use_workers(replica_worker.Job, seconds)


def test_replicas_in_processes_take_turns_with_one_process(workers, tables):
    words = ["--part=processes", "--r=2", "--k=1,3", "--m=3", "--cell_ms=100"]
    found = tables("replicas", *words, "--processes=2,3")["processes"]
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


def test_links_are_bounded_by_their_schedules(workers, tables):
    words = ["--part=links", "--k=4", "--m=20", "--link_ms=50"]
    found = tables("replicas", *words, "--cell_ms=100")["links"]
    shown = [(r["schedule"], round(r["share"], 3), r["held"]) for r in found]
    assert shown == [
        ("gpipe", 0, 20),
        ("gpipe", 0, 20),
        ("1f1b", 0, 4),
        ("1f1b", 0, 4),
        ("1f1b", 0.167, 7),
        ("interleaved", 0, 8),
        ("interleaved", 0, 8),
        ("interleaved", 0.333, 17),
    ]
    # 3 (M + K - 1) tasks; the way there and back of 3 links
    assert [found[i]["bound_ms"] for i in (0, 1, 4)] == [6900, 7200, 7200]
    # halves of them: 3 (2 M + K - 1) and the same ways
    assert found[7]["bound_ms"] == pytest.approx(50 * 129 + 300)
    assert found[3]["bound_ms"] > 7200
    # A second more, of which 300 ms nothing hides; a link has 2 M transfers.
    assert found[2]["hidden"] is None
    assert found[1]["hidden"] == pytest.approx(1 - 0.7 / 2)
    assert found[4]["hidden"] == pytest.approx(1 + 0.3 / 2)
    assert found[6]["hidden"] == pytest.approx(1 - 0.7 / 4)


@pytest.mark.parametrize("flag", ["--link_ms=0", "--cell_ms=0", "--k=1,2"])
def test_links_need_two_devices_and_time(flag, capsys):
    assert bench.main(["bench", "replicas", "--part=links", flag]) == 2
    assert "Links need --link_ms" in capsys.readouterr().err


def test_delayed_clusters_reach_workers_by_relays(monkeypatch):
    reached = []

    def connect(self, hosts, num_devices):
        self._start_tensorflow({"host": "127.0.0.1:7"})

    monkeypatch.setattr(controller.Cluster, "__init__", connect)
    monkeypatch.setattr(
        controller.Cluster,
        "_start_tensorflow",
        lambda self, addresses: reached.append(addresses["host"]),
    )
    DelayedCluster(None, 1, 0.01)
    assert reached != ["127.0.0.1:7"]
    assert reached[0].startswith("127.0.0.1:")


def test_links_to_where_nobody_listens_are_closed():
    with socket.socket() as silent:
        # Taken, or the link might listen there, and connect to itself.
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        address = DelayedLinks(0.0).to(f"127.0.0.1:{port}")
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as near:
            assert near.recv(10) == b""


def test_links_hand_on_every_byte_later():
    sent, seconds = bytes(range(256)) * 1000, 0.05

    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        address = DelayedLinks(seconds).to(f"{host}:{port}")
        host, _, port = address.rpartition(":")
        start = time.monotonic()
        with socket.create_connection((host, int(port))) as near:
            far = server.accept()[0]
            near.sendall(sent[:100])
            assert far.recv(1000) == sent[:100]
            far.sendall(sent)
            far.close()
            received = b"".join(iter(lambda: near.recv(2**16), b""))
    assert received == sent
    assert time.monotonic() - start >= 2 * seconds


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [None, signal.SIGINT, signal.SIGKILL])
def test_processes_of_replicas_end_in_every_case(signal_, tmp_path):
    """When it is done, is interrupted, or killed."""
    words = "replicas --part=processes --r=2 --k=1 --m=2 --cell_ms=5".split()
    words += ["--rounds=3" if signal_ is None else "--rounds=1000000"]
    # A shell's background jobs, and what they start, ignore Ctrl-C.
    code = (
        "import signal, sys; from tools.bench import __main__ as bench; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(bench.main(['bench', *sys.argv[1:]]))"
    )
    run = processes.Process(
        tmp_path, "bench", "-c", code, *words, "--format=json"
    )
    children = set()

    def has_workers():
        children.update(step_worker._descendants(run.popen.pid))
        word = "tfgpipe\0worker"
        return sum(word in command(pid) for pid in children) == 2

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
        shown = run.output[run.output.index("{") :]  # TensorFlow's notes first
        (table,) = json.loads(shown)["tables"]
        one, two = table["rows"]
        assert 0 < two["efficiency"] < 1 and 0 < one["efficiency"] < 1
        assert one["exchanged_mib"] == two["exchanged_mib"] > 0


def command(pid):
    """What a process runs; nothing once it has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
