"""What the tasks of each layer take, measured."""

from tfgpipe.profiles.profile import MEASURED, Profile
from tfgpipe.profiles.profiler import kept_in_row, profile

__all__ = [
    "MEASURED",
    "Profile",
    "kept_in_row",
    "profile",
]
