r"""Lends this host's devices to a training run on another host.

    python -m tools.worker --port=2222
    python -m tools.worker --port=2222 --num_virtual_devices=2

On the other host, `python -m tools.train --workers=HOST:2222` is the
controller: cells, with their weights, optimizer state and updates, are on the
workers' devices, and nothing is written to their disks. A worker has one
controller at a time. When that ends, or dies, the worker forgets everything,
and waits for the next, in the same process but as if it had just been started.

Workers do what any controller asks: let none but your own hosts reach them.
They take connections from it on --port, and on one that TensorFlow chooses, and
must reach each other and the controller.
"""

import contextlib
import os
import pathlib
import select
import socket
import sys
import time

import tensorflow as tf
from absl import flags

from tools import command_line, device_memory, devices
from tools.cluster import link
from tools.cluster.hosts import Hosts
from tools.cluster.link import Link

FLAGS = command_line.new_flags()
flags.DEFINE_integer(
    "port",
    2222,
    "Where to wait for the controller; 0 for any.",
    0,
    2**16 - 1,
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "num_virtual_devices",
    None,
    "Split the CPU into so many devices.",
    1,
    flag_values=FLAGS,
)


class Worker:
    """Waits for a controller, and for its end.

    Args:
        port: To listen on; 0 for any.
        tensorflow_port: Where TensorFlow's server listens.

    Attributes:
        port: Where it listens.
        controller: Where the controller is, once there is one.

    Raises:
        ValueError: If the port cannot be had.
    """

    def __init__(self, port: int, tensorflow_port: int) -> None:
        try:
            self._listener = socket.create_server(("", port))
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"The port must be free. Received: port={port}, which gives: "
                f"{error}. End what uses it, or take another."
            ) from error
        self.port = self._listener.getsockname()[1]
        self.controller = ""
        self._tensorflow_port = tensorflow_port

    def serve(self, timeout: float | None = None) -> int | None:
        """Works for one controller.

        Args:
            timeout: Seconds to wait for it; `None` waits for ever.

        Returns:
            The exit code that the controller ends with; `None` if it died.

        Raises:
            TimeoutError: If none comes.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._listener], [], [], left)[0]:
                raise TimeoutError
            connection = self._accept()
            if connection is not None:
                break
        try:
            return self._obey(connection)
        except OSError:
            return None
        finally:
            connection.close()

    def close(self) -> None:
        """Takes no more controllers."""
        self._listener.close()

    def _accept(self) -> Link | None:
        """A controller; None if it is something else that connected."""
        connection = Link(self._listener.accept()[0])
        try:
            self.controller = connection.receive(link.ANSWER)["controller"]
            connection.send(
                fingerprint=link.fingerprint(), port=self._tensorflow_port
            )
        except (OSError, KeyError):
            connection.close()
            return None
        return connection

    def _obey(self, connection: Link) -> int:
        code: int | None = None
        beat: float | None = None  # when the next one is due
        while True:
            left = None if beat is None else max(0.0, beat - time.monotonic())
            ready, _, _ = select.select(
                [connection, self._listener], [], [], left
            )
            if self._listener in ready:
                self._send_away()
            if connection not in ready:
                if beat is not None and time.monotonic() >= beat:
                    beat = time.monotonic() + link.BEAT
                    with contextlib.suppress(OSError):  # seen by `receive`
                        connection.send(beat=device_memory.process_mib())
                continue
            try:
                message = connection.receive()
            except OSError:
                if code is None:
                    raise
                return code  # it has ended, and its devices are not in use
            if "reach" in message:
                connection.send(unreachable=_unreachable(message["reach"]))
                beat = time.monotonic()
            code = message.get("end", code)

    def _send_away(self) -> None:
        """Tells another controller that this worker is taken."""
        other = Link(self._listener.accept()[0])
        with contextlib.suppress(OSError):  # it is gone already
            other.receive(1.0)
            other.send(busy_with=self.controller)
        other.close()


def _unreachable(addresses: list[tuple[str, int]]) -> list[str]:
    """Of these (host, port), those that do not answer, and why."""
    found = []
    for name, port in addresses:
        try:
            socket.create_connection((name, port), link.ANSWER / 4).close()
        except OSError as error:
            found.append(f"{name}:{port}: {error}")
    return found


def start(port: int, num_virtual_devices: int | None) -> Worker:
    """Starts TensorFlow's server, and the worker in front of it.

    Args:
        port: To listen on; 0 for any.
        num_virtual_devices: Parts to split the CPU into. `None` is one.

    Raises:
        ValueError: If the port cannot be had.
    """
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": num_virtual_devices or 1},
    )
    if num_virtual_devices or not devices.has_accelerator():
        # As `devices.split_cpu`: sums do not depend on a host's cores.
        config.intra_op_parallelism_threads = 1
    server = tf.distribute.Server(
        {"worker": ["localhost:0"]},
        job_name="worker",
        task_index=0,
        config=config,
    )
    return Worker(port, int(server.target.rpartition(":")[2]))


def serve_once(
    hosts: Hosts, num_virtual_devices: int | None, timeout: float
) -> int:
    """Lends this host's devices to the controller of a cluster, and ends.

    Args:
        hosts: The cluster.
        num_virtual_devices: Parts to split the CPU into; `None` is one.
        timeout: Seconds to wait for the controller.

    Returns:
        The exit code: that of the controller, or 3 if it was lost.

    Raises:
        ValueError: If this process's port cannot be had.
    """
    own = hosts.own
    worker = start(own.port, num_virtual_devices)
    print(
        f"tools.train: {own} is ready. It waits up to {timeout:g} s for the "
        f"controller, {hosts.controller}.",
        flush=True,
    )
    try:
        code = worker.serve(timeout)
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
        worker.close()
    print(
        f"tools.train: The controller, {hosts.controller}, {problem}. See what "
        "it says. To go on from the last checkpoint, give the same command on "
        "every host; to wait longer, with --connect_timeout.",
        file=sys.stderr,
    )
    return link.LOST


def _start_again(port: int) -> None:
    """Replaces this process by a new one, which has no memory of this run."""
    for entry in pathlib.Path("/proc/self/fd").glob("*"):
        if int(entry.name) > 2:  # such as devices, and TensorFlow's sockets
            with contextlib.suppress(OSError):  # it was that of the loop
                os.set_inheritable(int(entry.name), False)
    flag = f"--port={port}"  # the last one counts
    arguments = [word for word in sys.orig_argv[1:] if word != flag]
    os.execv(sys.executable, [sys.executable, *arguments, flag])


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    return command_line.run("tools.worker", FLAGS, __doc__, _run, argv)


def _run(values: flags.FlagValues) -> None:
    worker = start(values.port, values.num_virtual_devices)
    print(f"tools.worker: ready on port {worker.port}", flush=True)
    code = worker.serve()
    how = "is gone" if code is None else f"has ended with exit code {code}"
    print(
        f"tools.worker: The controller, {worker.controller}, {how}. "
        "Waiting for the next.",
        flush=True,
    )
    _start_again(worker.port)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
