"""The line between the controller of a training run and one of its workers.

A TCP connection that stays open for the whole run; a message is a line of JSON.
Tensors do not go over it: TensorFlow's servers have other connections.
When either end is killed its system closes the connection, and the other end
knows at once; when a host or the network dies, after `SILENCE` seconds, whether
something was sent meanwhile or not; and the controller, when a worker is
stopped or hangs, after `BEATS` beats, a minute. Devices that hang are noticed
by the controller.

Whatever is sent, a message is an object of JSON, of limited size, that is there
in limited time, or the line is closed.

Messages, in this order, after the handshake of `secret.py`:

    controller  {"hosts": [names and addresses of all]}
    worker      {"told": to whom TensorFlow's port is open now}
    controller  {"reach": [[host, port], ...]}
    worker      {"unreachable": ["host:port: why", ...]}
                {"beat": {}}, again and again
    controller  {"end": exit code}
"""

import contextlib
import functools
import hashlib
import json
import pathlib
import socket
import time
from typing import Any

import keras
import tensorflow as tf

_IDLE, _INTERVAL, _COUNT = 10, 5, 3
SILENCE = _IDLE + _INTERVAL * _COUNT  # seconds without a sign of the other host
ANSWER = 20.0  # seconds to answer a message in
HELLO = 5.0  # seconds for a stranger to say who it is
BEAT = 5.0  # seconds from one sign of life of a worker to the next
BEATS = 12  # that may be missing
LOST = 3  # the exit code where the other side was lost
_LONGEST = 2**20  # bytes


class Link:
    """One end of the line.

    Args:
        connection: The connected socket.

    Attributes:
        near_host: Address of this host, as the other one sees it.
        far_host: Address of the other one, as this one sees it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""
        self.near_host = connection.getsockname()[0]
        self.far_host = connection.getpeername()[0]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (  # not all systems have them
            ("TCP_KEEPIDLE", _IDLE),
            ("TCP_KEEPINTVL", _INTERVAL),
            ("TCP_KEEPCNT", _COUNT),
            # What was sent and not acknowledged keeps the others from being
            # looked at: then Linux sends it again, for 16 minutes.
            ("TCP_USER_TIMEOUT", SILENCE * 1000),
        ):
            if hasattr(socket, name):
                option = getattr(socket, name)
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, **message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the other end is gone.
        """
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Returns the next message.

        Args:
            timeout: Seconds to wait for all of it; `None` waits for ever.

        Raises:
            OSError: If the other end is gone, sends no message in time, or
                something else than messages.
        """
        line = self._line(timeout)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError(f"it sent {line[:40]!r}")
        return message

    def _line(self, timeout: float | None) -> bytes:
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST:
                raise ConnectionError(f"it sent more than {_LONGEST} bytes")
            left = None if end is None else max(1e-3, end - time.monotonic())
            self._socket.settimeout(left)
            try:
                more = self._socket.recv(2**16)
            finally:
                self._socket.settimeout(None)
            if not more:
                raise ConnectionError("the connection was closed")
            self._received += more
            if end is not None and time.monotonic() > end:
                raise TimeoutError("timed out")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """Hangs up; who reads from it in another thread is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@functools.cache
def fingerprint() -> dict[str, str]:
    """Returns what must be the same on all hosts: versions, this code."""
    root = pathlib.Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        code.update(name.encode() + b"\0" + path.read_bytes())
    return {
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "code of tfgpipe": code.hexdigest()[:12],
    }
