"""The folder of a training's checkpoints: which there are, and which are kept.

    folder/step-0000000100/manifest.json, values.index, values.data-...
    folder/step-0000000200/...
    folder/.unfinished-step-0000000300/...      being written, or left by a kill

A checkpoint gets its name when it is whole and on the disk, and loses it before
any of its files is deleted. So whatever ends the process, all that has a name
is whole. Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import shutil

from tfgpipe.checkpoints import manifest as manifest_lib
from tfgpipe.checkpoints.manifest import Damaged, Manifest

_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step-(\d+)")


class Folder:
    """The checkpoints of one training.

    Args:
        path: Where they are.

    Raises:
        OSError: From `make`, if there cannot be any.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)

    def make(self) -> None:
        """Makes the folder if need be; clears what a kill has left there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left)
            probe = self.path / f"{_UNFINISHED}probe"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise OSError(
                error.errno,
                "`folder` must be a folder that can be written to. Received: "
                f"folder={str(self.path)!r}, and this error: "
                f"{error.strerror or error}. Choose another one.",
            ) from error

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order; damaged ones too."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(p.name) for p in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def of(self, step: int) -> pathlib.Path:
        """Where the checkpoint of a step is, or would be."""
        return self.path / f"step-{step:010d}"

    def begin(self, step: int) -> pathlib.Path:
        """Makes a folder in which the checkpoint of a step can be written."""
        unfinished = self.path / f"{_UNFINISHED}{self.of(step).name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        return unfinished

    def finish(self, unfinished: pathlib.Path, step: int) -> None:
        """Gives a checkpoint its name, once all of it is on the disk."""
        for path in unfinished.iterdir():
            manifest_lib.to_disk(path)
        manifest_lib.to_disk(unfinished)
        if self.of(step).exists():  # of a run that began anew
            self._delete(step)
        os.replace(unfinished, self.of(step))
        manifest_lib.to_disk(self.path)

    def keep(self, count: int, mode: str) -> None:
        """Deletes all but the last ones, and the best one.

        Args:
            count: How many of the last ones stay.
            mode: "min" or "max": which monitored value is the best.
        """
        steps = self.steps()
        kept = set(steps[-count:])
        if values := self._monitored():
            best = min if mode == "min" else max
            kept.add(best(values, key=lambda step: (values[step], -step)))
        for step in steps:
            # What is damaged is left to the user.
            if step not in kept and self._manifest(step) is not None:
                self._delete(step)

    def best(self, mode: str) -> float | None:
        """The best monitored value of all checkpoints, or None."""
        values = self._monitored().values()
        if not values:
            return None
        return min(values) if mode == "min" else max(values)

    def _monitored(self) -> dict[int, float]:
        """By step, the monitored value, where there is a number."""
        found = {
            step: manifest.monitored["value"]
            for step in self.steps()
            if (manifest := self._manifest(step)) and manifest.monitored
        }
        return {k: v for k, v in found.items() if not math.isnan(v)}

    def _manifest(self, step: int) -> Manifest | None:
        try:
            return manifest_lib.read(self.of(step))
        except Damaged:
            return None

    def _delete(self, step: int) -> None:
        nameless = self.path / f"{_UNFINISHED}deleted-{self.of(step).name}"
        shutil.rmtree(nameless, ignore_errors=True)
        os.replace(self.of(step), nameless)
        shutil.rmtree(nameless)
