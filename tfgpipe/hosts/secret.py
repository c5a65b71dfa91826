"""The secret of all hosts, and how they show that they know it.

A file with a long random text, the same on all hosts, readable by its owner
alone. It is never sent: each side shows that it knows it, by a hash of it with
numbers that both have just drawn (HMAC, RFC 2104). So a connection begins:

    worker      {"nonce": W}
    controller  {"nonce": C, "controller": "process 7 on host0",
                 "proof": of "controller", W, C}
    worker      {"fingerprint": {...}, "port": of TensorFlow's server,
                 "proof": of "worker", W, C}
             or {"busy_with": its controller}, or {"refused": why}; it hangs up
"""

import contextlib
import hashlib
import hmac
import os
import pathlib
import secrets
import stat
from typing import Any

from tfgpipe.hosts import link
from tfgpipe.hosts.link import Link

_DEFAULT = pathlib.Path("~/.config/tfgpipe/secret")
_SHORTEST = 16  # bytes


def read(path: str | None = None) -> bytes:
    """Returns the secret.

    Args:
        path: The file. `None` for ~/.config/tfgpipe/secret, which is made if
            there is none.

    Raises:
        ValueError: If it cannot be read, others may read it, or it is short.
    """
    file = _DEFAULT.expanduser() if path is None else pathlib.Path(path)
    try:
        if path is None and not file.exists():
            _make(file)
        mode = stat.S_IMODE(file.stat().st_mode)
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(
            f"`secret_file` must be a file that can be read: {error}. Copy the "
            "file of another host."
        ) from error
    if mode & 0o077 or len(secret) < _SHORTEST:
        raise ValueError(
            f"`secret_file` must hold at least {_SHORTEST} bytes, and be "
            f"readable by its owner alone. Received: {str(file)!r} with "
            f"{len(secret)} and the mode {mode:o}. Write, such as, the output "
            "of `openssl rand -hex 32`, and chmod 600 it."
        )
    return secret


def nonce() -> str:
    """Returns a number that was never used before."""
    return secrets.token_hex(16)


def proof(secret: bytes, role: str, *nonces: str) -> str:
    """Returns what only somebody with the secret can say, in a role.

    `nonces` are the worker's number, and the controller's.
    """
    text = "\n".join([role, *nonces])
    content = text.encode(errors="backslashreplace")
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def is_proof(received: object, expected: str) -> bool:
    """Returns whether something that was received is a proof."""
    text = str(received).encode(errors="backslashreplace")
    return hmac.compare_digest(text, expected.encode())


def _make(file: pathlib.Path) -> None:
    """Makes the file, whole at once: others may do so at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    whole = file.with_name(f"{file.name}.{nonce()}")
    handle = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(secrets.token_hex(32) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(whole, file)
    whole.unlink()


# -------------------------------------------------------------- the handshake
class Refused(ConnectionError):
    """The other side does not know the secret."""


def admit(connection: Link, known: bytes) -> tuple[str, str]:
    """Lets a controller in that knows the secret.

    Returns its name, and the proof for the answer to it.

    Raises:
        OSError: If it is no controller, or one without the secret.
    """
    ours = nonce()
    connection.send(nonce=ours)
    hello = connection.receive(link.HELLO)
    theirs = str(hello.get("nonce"))
    expected = proof(known, "controller", ours, theirs)
    if not is_proof(hello.get("proof"), expected):
        connection.send(refused="it has another secret")
        raise Refused("it has another secret")
    return str(hello["controller"]), proof(known, "worker", ours, theirs)


def introduce(
    connection: Link, known: bytes, name: str, timeout: float
) -> dict[str, Any]:
    """Shows a worker that this controller knows the secret.

    Returns the answer of a worker that is free.

    Raises:
        Refused: If one of the two does not know the secret.
        OSError: If it is no worker, does not answer, or has a controller.
    """
    ours, theirs = nonce(), str(connection.receive(timeout).get("nonce"))
    connection.send(
        nonce=ours,
        controller=name,
        proof=proof(known, "controller", theirs, ours),
    )
    answer = connection.receive(timeout)
    expected = proof(known, "worker", theirs, ours)
    if not is_proof(answer.get("proof"), expected):
        raise Refused("it has another secret")
    if "busy_with" in answer:
        raise ConnectionError(
            f"it works for another controller, {answer['busy_with']}"
        )
    return answer
