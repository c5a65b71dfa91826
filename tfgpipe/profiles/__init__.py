"""What the tasks of each layer take, measured."""

from tfgpipe.profiles.cell_seconds import MEASURED, CellSeconds, LayerSeconds
from tfgpipe.profiles.profile import Profile
from tfgpipe.profiles.profiler import kept_in_row, profile

__all__ = [
    "MEASURED",
    "CellSeconds",
    "LayerSeconds",
    "Profile",
    "kept_in_row",
    "profile",
]
