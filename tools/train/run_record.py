"""What a --train_dir says about its run: the file experiment.json.

A folder belongs to one run, and so to one set of parameters. Only the length of
the training may grow.
"""

import json
import pathlib
from typing import Any

from tfgpipe.files import FolderLock, clear_unfinished, write_text

_LENGTHS = {"epochs", "num_steps"}
_EARLIER = "earlier_num_steps"
_held: dict[pathlib.Path, FolderLock] = {}  # as long as this process lives


def claim(
    folder: pathlib.Path, run: dict[str, Any], may_grow: bool
) -> list[int]:
    """Takes a folder for a run, and notes the run there.

    Args:
        folder: It is made if need be.
        run: Parameters, "num_steps" among them, as JSON can hold them.
        may_grow: Whether a run of fewer steps may be there.

    Returns:
        How many steps the run had in earlier commands, if fewer, in order.

    Raises:
        ValueError: If another run, or process, has the folder.
    """
    path = folder / "experiment.json"
    new = json.loads(json.dumps(run))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        where = folder.resolve()
        if where not in _held:
            _held[where] = FolderLock(folder, "train_dir")
            clear_unfinished(folder)
        old = _read(path) if path.exists() else new
        earlier = old.pop(_EARLIER, [])
        _check(folder, old, new, may_grow)
        if new["num_steps"] > old["num_steps"]:
            earlier.append(old["num_steps"])
        kept = {**new, _EARLIER: earlier} if earlier else new
        write_text(path, json.dumps(kept, indent=2))
    except OSError as error:
        raise ValueError(
            "`train_dir` must be a folder that can be written to. "
            f"Received: train_dir={str(folder)!r}, which gives: {error}."
        ) from error
    return earlier


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or "num_steps" not in found:
        raise ValueError(
            "`train_dir` must be new, or hold this same run. Received: "
            f"train_dir={str(path.parent)!r}, whose {path.name} is not that of "
            "a run. Give another folder."
        )
    return found


def _check(
    folder: pathlib.Path, old: dict[str, Any], new: dict[str, Any], grow: bool
) -> None:
    """Refuses a run that is not the one of the folder."""
    before, now = _flat(old), _flat(new)
    differ = [n for n in {**before, **now} if before.get(n) != now.get(n)]
    if not differ:
        return
    is_longer = now["num_steps"] >= before.get("num_steps", 0)
    if grow and is_longer and set(differ) <= _LENGTHS:
        return
    lines = [
        f"  {name}: {before.get(name)} there, {now.get(name)} here"
        for name in differ
    ]
    longer = ", and --steps or --epochs grow" if grow else ""
    raise ValueError(
        "`train_dir` must be new, or hold this same run. Received: "
        f"train_dir={str(folder)!r}, which holds a run with other "
        "parameters:\n" + "\n".join(lines) + "\nGive another folder, or the "
        f"same flags as then; only --num_partitions may change{longer}."
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Parameters by the names that --set has for them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
