"""What the tasks of each layer take, measured."""

from tfgpipe.profiles.profile_record import (
    MEASURED,
    CellSeconds,
    LayerSeconds,
    Profile,
)
from tfgpipe.profiles.profiler import kept_in_row, profile

__all__ = [
    "MEASURED",
    "CellSeconds",
    "LayerSeconds",
    "Profile",
    "kept_in_row",
    "profile",
]
