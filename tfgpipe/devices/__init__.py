"""Devices: their names, and what is placed on them."""

from tfgpipe.devices import other_strategies, placement, strategy
from tfgpipe.devices.names import DeviceList
from tfgpipe.devices.placement import Storage
from tfgpipe.devices.strategy import PipelineStrategy, TPUPipelineStrategy
from tfgpipe.devices.tpu import connect_to_tpu, tpu_device_assignment
from tfgpipe.devices.update import update_on_devices, updates_slices_alike

__all__ = [
    "DeviceList",
    "PipelineStrategy",
    "Storage",
    "TPUPipelineStrategy",
    "connect_to_tpu",
    "other_strategies",
    "placement",
    "strategy",
    "tpu_device_assignment",
    "update_on_devices",
    "updates_slices_alike",
]
