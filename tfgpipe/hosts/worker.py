"""The worker's side of a run on several hosts.

A worker runs TensorFlow's server, which does what a controller sends it, and
has one controller at a time.
"""

import contextlib
import queue
import socket
import sys
import threading
from typing import Any

import tensorflow as tf

from tfgpipe.devices import local
from tfgpipe.hosts import link, port_filter, secret
from tfgpipe.hosts.link import Link


class Worker:
    """Waits for a controller, and for its end.

    Whoever connects has a few seconds to show that it knows the secret, while
    others do so, too.

    Args:
        port: To listen on; 0 for any.
        tensorflow_port: Where TensorFlow's server listens.
        known: The secret.
        bind: The address of this host to listen on.
        closes: Whether TensorFlow's port is closed to other hosts than those
            of the controller.

    Attributes:
        port: Where it listens.
        controller: Where the controller is, once there is one.

    Raises:
        ValueError: If the port cannot be had.
    """

    def __init__(
        self,
        port: int,
        tensorflow_port: int,
        known: bytes,
        bind: str = "127.0.0.1",
        closes: bool = True,
    ) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            self._listener = socket.create_server((bind, port), family=family)
        except (OSError, OverflowError) as error:
            raise ValueError(
                "The port must be free, and the address one of this host. "
                f"Received: port={port} and bind={bind!r}, which gives: "
                f"{error}."
            ) from error
        self.port = self._listener.getsockname()[1]
        self.controller = ""
        self._tensorflow_port = tensorflow_port
        self._known = known
        self._closes = closes
        self._busy = threading.Lock()
        self._taken: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._is_closed = False
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def serve(self, timeout: float | None = None) -> int | None:
        """Works for one controller; waits `timeout` seconds for it, or longer.

        Returns the exit code that it ends with; None if it died.

        Raises:
            TimeoutError: If none comes.
        """
        try:
            connection = self._taken.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        try:
            return self._obey(connection)
        except OSError:
            return None
        finally:
            connection.close()
            self._busy.release()

    def close(self) -> None:
        """Takes no more controllers."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes who listens
            self._listener.shutdown(socket.SHUT_RDWR)
        # Else it could take what comes to a socket that has this one's number.
        self._listening.join(1.0)
        self._listener.close()

    def _listen(self) -> None:
        while not self._is_closed:
            # Closed, or the stranger is gone already.
            with contextlib.suppress(OSError):
                stranger = Link(self._listener.accept()[0])
                threading.Thread(
                    target=self._admit, args=(stranger,), daemon=True
                ).start()

    def _admit(self, stranger: Link) -> None:
        """Takes a controller; sends all else away."""
        is_taken = False
        try:
            name, proof = secret.admit(stranger, self._known)
            answer: dict[str, Any] = {"busy_with": self.controller}
            is_taken = self._busy.acquire(blocking=False)
            if is_taken:
                self.controller = name
                answer = {"port": self._tensorflow_port}
            stranger.send(**answer, fingerprint=link.fingerprint(), proof=proof)
        except OSError:
            if is_taken:  # it went away before it heard of it
                self._busy.release()
                is_taken = False
        if is_taken:
            self._taken.put(stranger)
        else:
            stranger.close()

    def _obey(self, connection: Link) -> int:
        code: int | None = None
        beat: float | None = None
        while True:
            try:
                message = connection.receive(beat)
            except TimeoutError:
                with contextlib.suppress(OSError):  # seen by `receive`
                    connection.send(beat={})
                continue
            except OSError:
                if code is None:
                    raise
                return code  # it has ended, and its devices are not in use
            if "hosts" in message:
                names = [*message["hosts"], connection.far_host]
                connection.send(told=self.restrict_port(*names))
            if "reach" in message:
                connection.send(unreachable=_unreachable(message["reach"]))
                beat = link.BEAT
            if "end" in message:
                code = message["end"]

    def restrict_port(self, *names: str) -> str:
        """Closes TensorFlow's port to other hosts; says to whom it is open."""
        return port_filter.restrict(
            self._tensorflow_port,
            names,
            "the hosts of its controller",
            self._closes,
        )


def _unreachable(addresses: list[list[Any]]) -> list[str]:
    """Returns which of (host, port) do not answer, and why."""
    problems = []
    for name, port in addresses:
        try:
            socket.create_connection((name, port), link.ANSWER / 4).close()
        except (OSError, OverflowError) as error:
            problems.append(f"{name}:{port}: {error}")
    return problems


def start(
    port: int,
    num_virtual_devices: int | None,
    known: bytes,
    bind: str,
    closes: bool = True,
) -> Worker:
    """Starts TensorFlow's server, and the worker in front of it.

    Says to whom TensorFlow's port is open. `num_virtual_devices` are the parts
    to split the CPU into; all else is as for `Worker`.
    """
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": num_virtual_devices or 1},
    )
    if num_virtual_devices or not local.has_accelerator():
        # As `local.split_cpu`: sums do not depend on a host's cores.
        config.intra_op_parallelism_threads = 1
    server = tf.distribute.Server(
        {"worker": ["localhost:0"]},
        job_name="worker",
        task_index=0,
        config=config,
    )
    tensorflow_port = int(server.target.rpartition(":")[2])
    worker = Worker(port, tensorflow_port, known, bind, closes)
    print(worker.restrict_port(), file=sys.stderr, flush=True)
    return worker
