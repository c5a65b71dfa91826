"""The hosts that take part in a run."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Host:
    """A process with devices, on some host.

    Attributes:
        job: "chief" or "worker".
        index: Its number in the job.
        name: Name or address of the host.
        port: Where its `tfgpipe worker` listens.
    """

    job: str
    index: int
    name: str
    port: int

    @property
    def task(self) -> str:
        """Returns the name that TensorFlow has for it."""
        return f"/job:{self.job}/replica:0/task:{self.index}"

    @property
    def address(self) -> str:
        """Returns host and port."""
        return f"{self.name}:{self.port}"

    def __str__(self) -> str:
        return f"{self.job} {self.index} at {self.address}"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """All of them.

    Attributes:
        all: Those with devices, in order.
        here: Which of them is this process; `None` for a controller that has
            no devices in the run.
    """

    all: tuple[Host, ...]
    here: Host | None = None

    @property
    def controller(self) -> Host | None:
        """Returns the first, unless the controller is none of them."""
        return None if self.here is None else self.all[0]

    @property
    def others(self) -> tuple[Host, ...]:
        """Returns all but this process."""
        return tuple(host for host in self.all if host != self.here)


def of_workers(workers: Any) -> Hosts:
    """Returns the hosts of workers, with a controller that is none of them.

    Args:
        workers: host:port,host:port.

    Raises:
        ValueError: If it is malformed.

    Example:

    >>> [host.address for host in of_workers("host0:2222, host1:2222").all]
    ['host0:2222', 'host1:2222']
    """
    received = f"workers={workers!r}"
    return Hosts(hosts_of({"worker": str(workers).split(",")}, received))


def device_names(
    hosts: Hosts, names: Mapping[str, list[str]], wanted: int
) -> list[str]:
    """Returns the devices of all hosts: accelerators, or else CPUs.

    Args:
        hosts: The hosts.
        names: By kind, the best first, the devices that TensorFlow lists.
        wanted: How many there have to be at least.

    Returns:
        Names, of the first host first.

    Raises:
        ValueError: If there are too few, or a host has none of the kind that
            others have.
    """

    def listed_of(host: Host, kind: str) -> list[str]:
        return [n for n in names[kind] if n.startswith(f"{host.task}/")]

    kind = next(
        k for k in names if any(listed_of(host, k) for host in hosts.all)
    )
    by_host = {host: listed_of(host, kind) for host in hosts.all}
    lacking = [str(host) for host, listed in by_host.items() if not listed]
    if lacking:
        raise ValueError(
            f"All hosts must have a {kind} where one has. Received: none on "
            f"{', '.join(lacking)}. Leave these hosts out, or hide the others' "
            "with CUDA_VISIBLE_DEVICES."
        )
    devices = [name for listed in by_host.values() for name in listed]
    if len(devices) < wanted:
        counts = [f"{len(listed)} of {h}" for h, listed in by_host.items()]
        raise ValueError(
            "The replicas times the cells of each must be at most the number "
            f"of devices. Received: {wanted} wanted, of {len(devices)}: "
            f"{', '.join(counts)}. Ask for fewer, or start more workers; those "
            "without accelerators split their CPU with --num_virtual_devices."
        )
    return devices


def hosts_of(
    jobs: Mapping[str, Sequence[object]], received: str
) -> tuple[Host, ...]:
    """Returns the hosts of jobs; errors show what was `received`."""
    hosts = []
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            parts = re.fullmatch(r"\s*([^/\s]+):([0-9]+)\s*", str(address))
            if parts is None or not 0 < int(parts[2]) < 2**16:
                raise ValueError(
                    "Workers must be given as host:port, with ports from 1 to "
                    f"65535. Received: {address!r} in {received}. Write such "
                    "as host0:2222,host1:2222."
                )
            hosts.append(Host(job, index, parts[1], int(parts[2])))
    if len({host.address for host in hosts}) < len(hosts):
        raise ValueError(
            f"Workers must have different addresses. Received: {received}. "
            "Start a worker for each, on different ports where they share a "
            "host."
        )
    return tuple(hosts)
