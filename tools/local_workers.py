"""Workers in processes of this machine, for what wants to be several hosts."""

import contextlib
import re
import subprocess
import sys
from types import TracebackType

from tfgpipe.hosts import addresses


class LocalWorkers:
    """Processes of `tfgpipe worker`, each with a part of the CPU.

    A context manager: leaving it ends them.

    Args:
        count: How many. Positive.
        num_devices: Devices of each.

    Attributes:
        hosts: Where they are, as `tfgpipe.hosts.Cluster` takes them.

    Raises:
        RuntimeError: If one of them does not start.
    """

    def __init__(self, count: int, num_devices: int) -> None:
        self._running: list[subprocess.Popen] = []
        try:
            for _ in range(count):
                self._running.append(_started(num_devices))
            ports = [_port(process) for process in self._running]
        except BaseException:
            self.end()
            raise
        named = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.hosts = addresses.of_workers(named)

    def __enter__(self) -> "LocalWorkers":
        """They run already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Ends them, by force: they have nothing to lose."""
        for process in self._running:
            process.kill()
        for process in self._running:
            process.wait()
            with contextlib.suppress(OSError):
                process.stdout.close()


def _started(num_devices: int) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "tfgpipe", "worker", "--port=0"),
            f"--num_virtual_devices={num_devices}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def _port(process: subprocess.Popen) -> int:
    """Where a worker listens, once it does."""
    for line in process.stdout:
        if found := re.search(r"ready on port (\d+)", line):
            return int(found[1])
    raise RuntimeError(
        f"A worker must start. Received: exit code {process.wait()} of "
        f"{process.args}. Its standard error says why."
    )
