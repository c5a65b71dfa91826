"""One process at a time writes to a folder."""

import os
import pathlib
import socket
import time

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

# Open as long as this process lives; the system unlocks what a killed one held.
_held: dict[pathlib.Path, int] = {}


def claim(folder: pathlib.Path) -> None:
    """Keeps a folder for this process, until it ends.

    Args:
        folder: It exists.

    Raises:
        ValueError: If another process has claimed it; says which.
        OSError: If it cannot be written to.
    """
    path = folder.resolve() / "lock"
    if path in _held or fcntl is None:
        return
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 1000).decode() or "another process"
        os.close(file)
        raise ValueError(
            "`train_dir` must not be in use by another run. Received: "
            f"train_dir={str(folder)!r}, in use by {holder}. Wait until that "
            "one has ended, end it, or give another folder."
        ) from None
    except OSError:
        os.close(file)
        raise
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {socket.gethostname()} since {now}"
    os.ftruncate(file, 0)
    os.write(file, text.encode())
    _held[path] = file
