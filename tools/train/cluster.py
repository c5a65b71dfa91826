"""Hosts that run the same command: those of --workers, or of TF_CONFIG."""

import json
import os
import sys
from collections.abc import Mapping

from tfgpipe.hosts import link, worker
from tfgpipe.hosts.addresses import Hosts, hosts_of, of_workers

_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_JOBS = ("chief", "worker")


def given(
    workers: str | None, environment: Mapping[str, str] = os.environ
) -> Hosts | None:
    """Returns the hosts that the user or TF_CONFIG names.

    Args:
        workers: host:port,host:port; `None` for none.
        environment: Where TF_CONFIG may be.

    Raises:
        ValueError: If what is given is malformed.
    """
    config = environment.get("TF_CONFIG", "").strip()
    if workers is None:
        return _from_tf_config(config) if config else None
    if config:
        raise ValueError(
            "`workers` and TF_CONFIG must not be given both. Received: "
            f"workers={workers!r} and TF_CONFIG={config}. Unset one of them."
        )
    return of_workers(workers)


def _from_tf_config(text: str) -> Hosts | None:
    received = f"TF_CONFIG={text}"
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        jobs = {job: list(known) for job, known in cluster.items()}
        here = task.get("type"), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"TF_CONFIG must be JSON such as {_EXAMPLE}. Received: {received}."
        ) from error
    hosts = hosts_of({job: jobs.get(job, []) for job in _JOBS}, received)
    is_known = jobs.keys() <= {*_JOBS} and len(jobs.get("chief", [])) < 2
    if len(hosts) < 2 and is_known:
        return None
    this = [host for host in hosts if (host.job, host.index) == here]
    if not is_known or not this:
        raise ValueError(
            "TF_CONFIG must have workers, at most one chief and no other jobs, "
            f"and say which of them this process is, as in {_EXAMPLE}. "
            f"Received: {received}."
        )
    return Hosts(hosts, this[0])


def serve_once(
    hosts: Hosts,
    num_virtual_devices: int | None,
    timeout: float,
    known: bytes,
    closes: bool = True,
) -> int:
    """Lends this host's devices to the controller of a cluster, and ends.

    It waits `timeout` seconds for one that has the secret `known`; `closes` is
    whether TensorFlow's port is closed to strangers.

    Raises:
        ValueError: If this process's port cannot be had.
    """
    here = hosts.here or hosts.all[0]
    server = worker.start(
        here.port, num_virtual_devices, known, here.name, closes
    )
    print(
        f"tools.train: {here} is ready. It waits up to {timeout:g} s for the "
        f"controller, {hosts.controller}.",
        flush=True,
    )
    try:
        code = server.serve(timeout)
    except TimeoutError:
        problem = f"did not come within {timeout:g} s"
    except KeyboardInterrupt:
        return 130
    else:
        if code is not None:
            print(f"tools.train: The controller ended with exit code {code}.")
            return code
        problem = "is gone, in the middle of its work"
    finally:
        server.close()
    print(
        f"tools.train: The controller, {hosts.controller}, {problem}. See what "
        "it says. To go on from the last checkpoint, give the same command on "
        "every host; to wait longer, with --connect_timeout.",
        file=sys.stderr,
    )
    return link.LOST
