"""The worker's side of a run on several hosts.

A worker runs TensorFlow's server, which does what a controller sends it, and
has one controller at a time.
"""

import contextlib
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfgpipe.devices import local
from tfgpipe.hosts import link, port_filter, secret
from tfgpipe.hosts.link import Link

_WAKING = 1.0  # seconds, at most
_MOST_STRANGERS = 64  # that may introduce themselves at the same time


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
                f"{error}. End what uses it, or take another."
            ) from error
        self.port = self._listener.getsockname()[1]
        self.controller = ""
        self._tensorflow_port = tensorflow_port
        self._known = known
        self._lock = threading.Lock()
        self._is_taken = False
        self._taken: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._strangers: list[Link] = []  # the first are the oldest
        self._closes = closes
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
            self._is_taken = False

    def close(self) -> None:
        """Takes no more controllers."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes who listens
            self._listener.shutdown(socket.SHUT_RDWR)
        # Else it could take what comes to a socket that has this one's number.
        self._listening.join(_WAKING)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                stranger = Link(self._listener.accept()[0])
            except OSError:  # closed; or the stranger is gone already
                if self._is_closed:
                    return
                continue
            if self._is_closed:
                stranger.close()
                return
            with self._lock:
                self._strangers.append(stranger)
                too_many = len(self._strangers) > _MOST_STRANGERS
                # Who knows the secret says so at once, and is not the oldest.
                oldest = self._strangers.pop(0) if too_many else None
            if oldest is not None:
                oldest.cut()
            threading.Thread(
                target=self._admit, args=(stranger,), daemon=True
            ).start()

    def _admit(self, stranger: Link) -> None:
        """Takes a controller; sends all else away."""
        is_taken = False
        try:
            name, proof = secret.admit(stranger, self._known)
            answer = self._take(name)
            is_taken = "busy_with" not in answer
            stranger.send(**answer, proof=proof)
        except OSError:
            if is_taken:  # it went away before it heard of it
                is_taken = self._is_taken = False
        with self._lock:
            if stranger in self._strangers:
                self._strangers.remove(stranger)
        if is_taken:
            self._taken.put(stranger)
        else:
            stranger.close()

    def _take(self, name: str) -> dict[str, Any]:
        prints = link.fingerprint()
        with self._lock:
            if self._is_taken:
                return {"busy_with": self.controller}
            self._is_taken, self.controller = True, name
        return {"fingerprint": prints, "port": self._tensorflow_port}

    def _obey(self, connection: Link) -> int:
        code: int | None = None
        beat: float | None = None  # when the next one is due
        while True:
            left = None if beat is None else max(0.0, beat - time.monotonic())
            if (
                not connection.has_message
                and not (select.select([connection], [], [], left)[0])
            ):
                beat = time.monotonic() + link.BEAT
                with contextlib.suppress(OSError):  # seen by `receive`
                    connection.send(beat={})
                continue
            try:
                message = connection.receive(link.ANSWER)
            except OSError:
                if code is None:
                    raise
                return code  # it has ended, and its devices are not in use
            try:
                if "hosts" in message:
                    problem = self._open_to(
                        [*map(str, message["hosts"]), connection.far_host]
                    )
                    connection.send(open=problem is not None)
                if "reach" in message:
                    ways = [(str(n), int(p)) for n, p in message["reach"]]
                    connection.send(unreachable=_unreachable(ways))
                    beat = time.monotonic()
                if "end" in message:
                    code = int(message["end"]) % 256
            except (TypeError, ValueError) as error:
                raise ConnectionError("it sent what it should not") from error

    def _open_to(self, names: Iterable[str]) -> str | None:
        """Opens TensorFlow's port to hosts alone; or returns why it cannot."""
        return port_filter.problem(self._tensorflow_port, names, self._closes)

    def close_port(self) -> str:
        """Closes TensorFlow's port to other hosts; says to whom it is open."""
        problem, port = self._open_to(()), self._tensorflow_port
        return port_filter.told(port, problem, "the hosts of its controller")


def _unreachable(addresses: list[tuple[str, int]]) -> list[str]:
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
    print(worker.close_port(), file=sys.stderr, flush=True)
    return worker
