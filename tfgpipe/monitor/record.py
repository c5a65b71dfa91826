"""What is kept of a training: numbers for TensorBoard, and pictures."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence

from tfgpipe.checks import checked_path
from tfgpipe.monitor.event_log import EventLog
from tfgpipe.monitor.picture import save_picture
from tfgpipe.timeline import Event


class Record:
    """Writes the numbers of epochs, where there is a folder for them.

    Args:
        log_dir: For TensorBoard: a folder "pipeline" in this one. Or None.
        pictures: For a picture of each measured step. Or None.

    Raises:
        ValueError: If a path is none, or there are to be pictures, and no
            matplotlib.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None,
        pictures: str | os.PathLike[str] | None,
    ) -> None:
        self._folder, self._pictures = (
            None if path is None else checked_path(name, path)
            for name, path in (("log_dir", log_dir), ("pictures", pictures))
        )
        self._log: EventLog | None = None
        if self._pictures is None:
            return
        if not importlib.util.find_spec("matplotlib"):
            raise ValueError(
                "`pictures` needs matplotlib, which is not installed. "
                f"Received: pictures={str(pictures)!r}. Install it with `pip "
                "install matplotlib`, or leave `pictures` out."
            )
        self._pictures.mkdir(parents=True, exist_ok=True)

    def open(self) -> None:
        """Begins a file, beside those that are there."""
        if self._folder is not None:
            self._log = EventLog(self._folder / "pipeline")

    def write(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of an epoch, by name."""
        if self._log is not None:
            tagged = {f"pipeline/{name}": v for name, v in numbers.items()}
            self._log.write(epoch, tagged)

    def write_step(
        self, epoch: int, events: Sequence[Event], advice: str
    ) -> None:
        """Writes what is said about a measured step, and draws it."""
        if self._log is not None:
            self._log.write_text(epoch, "pipeline/advice", advice)
        if self._pictures is None:
            return
        path = self._pictures / f"epoch_{epoch + 1:04}.png"
        save_picture(events, f"Epoch {epoch + 1}", advice, path)
        if self._log is not None:
            self._log.write_picture(epoch, "pipeline/timeline", path)

    def close(self) -> None:
        """Ends the files."""
        if self._log is not None:
            self._log.close()
            self._log = None
