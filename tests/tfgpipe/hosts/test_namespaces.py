"""Hosts with a network between them: namespaces, which need no root.

A host that vanishes sends nothing any more, not that a connection is closed; on
loopback, nobody can vanish so. And strangers are elsewhere.
"""

import re
import subprocess
import time

import pytest
from processes import Process, train, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

WORKER, CONTROLLER, STRANGER = "10.9.0.1", "10.9.0.2", "10.9.0.3"
FLAGS = "--port=2222", f"--bind={WORKER}", "--num_virtual_devices=2"


def inside(host):
    return (
        "nsenter",
        f"--target={host.pid}",
        *("--user", "--net", "--preserve-credentials"),
    )


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts():
    """What runs a program on each of two hosts."""
    started = []
    try:
        run("unshare", "--map-root-user", "--net", "true")
        for enter in ((), None):
            first = inside(started[0]) if started else ()
            new = "--map-root-user" if enter == () else "--net"
            command = *first, "unshare", new, "--net", "sleep", "1000"
            started.append(subprocess.Popen(command))
            time.sleep(0.5)
        one, other = map(inside, started)
        peer = "peer", "name", "vb", "netns", str(started[1].pid)
        run(*one, "ip", "link", "add", "va", "type", "veth", *peer)
        for host, name, addresses in (
            (one, "va", [WORKER]),
            (other, "vb", [CONTROLLER, STRANGER]),
        ):
            for address in addresses:
                run(*host, "ip", "addr", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                run(*host, "ip", "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for host in started:
            host.kill()
            host.wait()
        pytest.skip(f"no network namespaces: {error}")
    yield one, other
    for host in started:
        host.kill()
        host.wait()


def port_in(process):
    found = re.search(
        r"TensorFlow's port (\d+) is open to users", process.output
    )
    return found and int(found[1])


def connects(host, source, goal, port):
    """Whether a host reaches a port, from one of its addresses."""
    code = (
        "import socket, sys; source, goal, port = sys.argv[1:];"
        "socket.create_connection((goal, int(port)), 3, (source, 0))"
    )
    command = *host, "python3", "-c", code, source, goal, str(port)
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def worker(hosts, tmp_path):
    command = "-m", "tfgpipe", "worker", *FLAGS
    made = Process(tmp_path, "worker", *command, inside=hosts[0])
    until(lambda: "ready on port" in made.output, made)
    yield made
    made.kill()


def trained(tmp_path, hosts, *flags):
    where = f"--workers={WORKER}:2222", f"--train_dir={tmp_path / 'run'}"
    return train(tmp_path, *where, *flags, inside=hosts[1])


def test_strangers_reach_no_port_of_tensorflow(hosts, worker, tmp_path):
    """Through one, a stranger has read the secret, and written a file."""
    port = port_in(worker)
    assert port is not None, worker.output
    for source in (CONTROLLER, STRANGER):
        assert not connects(hosts[1], source, WORKER, port)
    assert connects(hosts[0], WORKER, WORKER, port)
    run = trained(tmp_path, hosts, "--steps=100000")
    own = until(lambda: port_in(run), run)
    until(lambda: "Ideal bubble" in run.output, run)
    assert not connects(hosts[1], STRANGER, WORKER, port)
    assert connects(hosts[1], CONTROLLER, WORKER, port)
    assert connects(hosts[0], WORKER, CONTROLLER, own)
    command = *hosts[0], "ip", "addr", "add", "10.9.0.9/24", "dev", "va"
    subprocess.run(command, check=True)
    assert not connects(hosts[0], "10.9.0.9", CONTROLLER, own)
    run.kill()


def test_run_over_two_hosts_ends_as_on_one(hosts, worker, tmp_path):
    run = trained(tmp_path, hosts)
    assert run.wait() == 0, run.output
    assert (tmp_path / "run" / "final.keras").is_file()


def test_worker_is_free_soon_after_its_controller_has_vanished(
    hosts, worker, tmp_path
):
    """It took 16 minutes: beats that nobody acknowledges."""
    run = trained(tmp_path, hosts, "--steps=100000")
    until(lambda: "Ideal bubble" in run.output, run)
    time.sleep(7)  # beats go
    command = *hosts[1], "ip", "addr", "flush", "dev", "vb"
    subprocess.run(command, check=True)  # no FIN, no RST
    start = time.monotonic()
    until(lambda: "Waiting for the next" in worker.output, worker)
    took = time.monotonic() - start
    print(f"the worker was free after {took:.1f} s")
    assert took < 32
    run.kill()
