"""How a controller and a worker begin: each shows that it knows the secret.

worker      {"nonce": W}
controller  {"nonce": C, "controller": "process 7 on host0",
"fingerprint": {...}, "proof": of "controller", W, C}
worker      {"fingerprint": {...}, "port": of TensorFlow's server,
"proof": of "worker", W, C}
or {"busy_with": its controller}, or {"refused": why}; it hangs up
"""

from collections.abc import Callable
from typing import Any

from tfgpipe.hosts import link, secret
from tfgpipe.hosts.link import Link


class Refused(ConnectionError):
    """The other side does not know the secret."""


class Busy(ConnectionError):
    """A worker has a controller; the error's text says which."""


def admit(
    connection: Link, known: bytes, take: Callable[[str], dict[str, Any]]
) -> str | None:
    """The worker's side.

    Args:
        connection: To whoever has connected.
        known: The secret.
        take: Takes a controller of some name; returns what to answer.

    Returns:
        The name of the controller, if it was taken; None if not.

    Raises:
        OSError: If it is no controller, or one without the secret.
    """
    own = secret.nonce()
    connection.send(nonce=own)
    hello = connection.receive(link.HELLO)
    theirs, name = hello.get("nonce"), hello.get("controller")
    if not isinstance(theirs, str) or not isinstance(name, str):
        raise ConnectionError("it is no controller")
    expected = secret.proof(known, "controller", own, theirs)
    if not secret.is_proof(hello.get("proof"), expected):
        connection.send(refused="it has another secret")
        raise Refused("it has another secret")
    answer = take(name[:200])
    connection.send(**answer, proof=secret.proof(known, "worker", own, theirs))
    return None if "busy_with" in answer else name[:200]


def introduce(
    connection: Link, known: bytes, name: str, timeout: float
) -> dict[str, Any]:
    """The controller's side.

    Args:
        connection: To a worker.
        known: The secret.
        name: Of this controller.
        timeout: Seconds for each answer.

    Returns:
        The answer of a worker that is free.

    Raises:
        Refused: If one of the two does not know the secret.
        Busy: If it has another controller.
        OSError: If it is no worker, or does not answer.
    """
    theirs = connection.receive(timeout).get("nonce")
    if not isinstance(theirs, str):
        raise ConnectionError("no worker answers")
    own = secret.nonce()
    connection.send(
        nonce=own,
        controller=name,
        fingerprint=link.fingerprint(),
        proof=secret.proof(known, "controller", theirs, own),
    )
    answer = connection.receive(timeout)
    expected = secret.proof(known, "worker", theirs, own)
    if "refused" in answer or not secret.is_proof(
        answer.get("proof"), expected
    ):
        raise Refused("it has another secret")
    if "busy_with" in answer:
        raise Busy(str(answer["busy_with"]))
    if not isinstance(answer.get("port"), int):
        raise ConnectionError("no worker answers")
    return answer
