"""What the devices of several replicas exchange in a step."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import tfgpipe
from tfgpipe.devices import names, placement


def exchanged_bytes(model: tfgpipe.GPipe) -> dict[str, int]:
    """Bytes that a training step sends between replicas, by device.

    A device gets those weights of its cell that it does not own, and sends
    their gradients. So the sum over devices has everything that is sent, once.
    Gradients count as dense ones in the dtype of their variables, and no
    weight as one of several cells.

    Args:
        model: A model that is built.

    Returns:
        Weights that come in and gradients that go out.
    """
    weights = bytes_by_device(model.trainable_variables)
    found: dict[str, int] = {}
    for devices in {cell.devices for cell in model.cells()}:
        own = {
            device: sum(
                count
                for name, count in weights.items()
                if names.same_device(name, device)
            )
            for device in devices
        }
        for device, count in own.items():
            found[device] = 2 * (sum(own.values()) - count)
    return found


def bytes_by_device(variables: Iterable[Any]) -> Counter:
    """Bytes of variables, by the full names of their devices."""
    held: Counter = Counter()
    for variable in variables:
        held[variable.value.device] += placement.tensor_bytes(variable)
    return held
