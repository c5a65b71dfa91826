"""Devices: their names, the cells on them, and what is placed on them."""

from tfgpipe.devices import local, names, placement, strategy
from tfgpipe.devices.names import (
    CellDevices,
    Replicas,
    accelerators,
    all_devices,
    device_types,
    resolve_device,
)
from tfgpipe.devices.placement import (
    Storage,
    assign_in_pieces,
    place_variables,
    tensor_bytes,
)
from tfgpipe.devices.strategy import (
    PipelineStrategy,
    TPUPipelineStrategy,
    connect_to_tpu,
    tpu_device_assignment,
)

__all__ = [
    "CellDevices",
    "PipelineStrategy",
    "Replicas",
    "Storage",
    "TPUPipelineStrategy",
    "accelerators",
    "all_devices",
    "assign_in_pieces",
    "connect_to_tpu",
    "device_types",
    "local",
    "names",
    "place_variables",
    "placement",
    "resolve_device",
    "strategy",
    "tensor_bytes",
    "tpu_device_assignment",
]
