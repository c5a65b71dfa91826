"""GPipe for TensorFlow and Keras: models too big for one accelerator."""

from tfgpipe import versions

versions.check()  # before anything needs what an old version lacks

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfgpipe needs Keras on TensorFlow. Received: the Keras backend "
        f"{keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow before Keras is imported."
    )

from tfgpipe import callbacks, timeline
from tfgpipe.checkpoints import restore
from tfgpipe.devices import (
    PipelineStrategy,
    TPUPipelineStrategy,
    connect_to_tpu,
    tpu_device_assignment,
)
from tfgpipe.exactness import check
from tfgpipe.large_models import deferred, load_preset
from tfgpipe.model import GPipe, load_model
from tfgpipe.monitor import plot_cells
from tfgpipe.plans import MACHINES, Machine, plan
from tfgpipe.profiles import Profile, profile
from tfgpipe.schedules import Schedule
from tfgpipe.sequence import layers_of

__version__ = versions.VERSION

__all__ = [
    "MACHINES",
    "GPipe",
    "Machine",
    "PipelineStrategy",
    "Profile",
    "Schedule",
    "TPUPipelineStrategy",
    "callbacks",
    "check",
    "connect_to_tpu",
    "deferred",
    "layers_of",
    "load_model",
    "load_preset",
    "plan",
    "plot_cells",
    "profile",
    "restore",
    "timeline",
    "tpu_device_assignment",
]
