"""What the hosts of a run know in common, and strangers do not.

A file with a long random text, the same on all hosts, readable by its owner
alone. It is never sent: each side shows that it knows it, by a hash of it with
numbers that both have just drawn (HMAC, RFC 2104).
"""

import contextlib
import hashlib
import hmac
import os
import pathlib
import secrets
import stat

_DEFAULT = pathlib.Path("~/.config/tfgpipe/secret")
_SHORTEST = 16  # bytes


def read(path: str | None = None) -> bytes:
    """The secret.

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
        others = stat.S_IMODE(file.stat().st_mode) & 0o077
        found = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(
            "`secret_file` must be a file that can be read. Received: "
            f"{str(file)!r}, which gives: {error}. Copy that of another host."
        ) from error
    if others:
        raise ValueError(
            "`secret_file` must be readable by its owner alone. Received: "
            f"{str(file)!r}, which others may read, too: chmod 600 {file}"
        )
    if len(found) < _SHORTEST:
        raise ValueError(
            f"`secret_file` must hold at least {_SHORTEST} bytes. Received: "
            f"{str(file)!r} with {len(found)}. Write, such as, the output of "
            "`openssl rand -hex 32`."
        )
    return found


def nonce() -> str:
    """A number that was never used before."""
    return secrets.token_hex(16)


def proof(secret: bytes, role: str, *nonces: str) -> str:
    """What only somebody with the secret can say.

    Args:
        secret: The secret.
        role: Who says it: "controller" or "worker".
        nonces: The worker's number, and the controller's.
    """
    text = "\n".join([role, *nonces])
    content = text.encode(errors="backslashreplace")
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Whether something that was received is a proof."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(errors="backslashreplace"), expected.encode()
    )


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
