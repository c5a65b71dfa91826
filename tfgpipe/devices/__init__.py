"""Devices: their names, the cells on them, and what is placed on them."""

from tfgpipe.devices import local, names, placement, strategy
from tfgpipe.devices.names import CellDevices, Replicas
from tfgpipe.devices.placement import tensor_bytes
from tfgpipe.devices.strategy import (
    PipelineStrategy,
    TPUPipelineStrategy,
    connect_to_tpu,
    tpu_device_assignment,
)
