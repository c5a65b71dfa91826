"""Checkpoints of a training: written in the background, whole or not at all."""

from tfgpipe.checkpoints.folder import Folder, Position
from tfgpipe.checkpoints.restore import (
    Restored,
    is_known_damaged,
    known_steps_of,
    restore,
    steps_of,
)
from tfgpipe.checkpoints.writer import Writer, end_without_waiting, wait_for_all

__all__ = [
    "Folder",
    "Position",
    "Restored",
    "Writer",
    "end_without_waiting",
    "is_known_damaged",
    "known_steps_of",
    "restore",
    "steps_of",
    "wait_for_all",
]
