"""Measured times and bytes of each layer's tasks."""

from tfgpipe.profiles.profile_record import (
    MEASURED,
    CellSeconds,
    Profile,
    aligned,
    size_text,
)
from tfgpipe.profiles.profiler import profile
