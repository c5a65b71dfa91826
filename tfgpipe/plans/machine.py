"""Accelerators: how fast they compute, remember and send.

The figures are makers' peaks; `efficiency` is the share of the peak rate that
layers are taken to reach. To know, measure: `tfgpipe.profile`.

Pure Python: nothing here knows TensorFlow.

References:
    * [P100](https://images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-PCIe-datasheet.pdf)
    * [V100](https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf)
    * [T4](https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf)
    * [A100](https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)
    * [L4](https://www.nvidia.com/en-us/data-center/l4/)
    * [H100](https://www.nvidia.com/en-us/data-center/h100/)
    * [TPU v2 and v3](https://doi.org/10.1145/3360307), Jouppi et al., 2020,
      table 3; a chip has two cores
"""

from __future__ import annotations

import dataclasses
import math
import re

from tfgpipe.checks import is_amount


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of accelerator, and what joins it to others.

    Attributes:
        flops: Peak floating-point operations a second.
        memory: Bytes.
        memory_bandwidth: Bytes a second to and from its memory.
        bandwidth: Bytes a second to another accelerator, one way.
        latency: Seconds that a transfer takes besides.
        task_seconds: Seconds that a task takes besides its operations.
        efficiency: Share of `flops` that layers reach.
        name: Of the kind.

    Raises:
        ValueError: If a figure is no positive number.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    bandwidth: float
    latency: float = 10e-6
    task_seconds: float = 100e-6
    efficiency: float = 0.5
    name: str = "machine"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            is_time = field.name in ("latency", "task_seconds")
            most = 1 if field.name == "efficiency" else math.inf
            is_right = is_amount(value) and value <= most
            if not is_right or (value == 0 and not is_time):
                kind = "a number from 0" if is_time else "a positive number"
                raise ValueError(
                    f"`{field.name}` of a machine must be {kind}"
                    f"{' of at most 1' if most == 1 else ''}, in bytes, "
                    "seconds, or operations or bytes a second. "
                    f"Received: {field.name}={value!r}."
                )


def _gpu(
    name: str, flops: float, gib: float, memory: float, link: float
) -> Machine:
    return Machine(
        flops=flops * 1e12,
        memory=gib * 2**30,
        memory_bandwidth=memory * 1e9,
        bandwidth=link * 1e9,
        name=name,
    )


# float32 as TensorFlow multiplies it: TF32 on A100 and H100, bfloat16 on TPUs.
# Links: NVLink or, of "pcie" and others, PCI express; one way.
MACHINES = {
    machine.name: machine
    for machine in (
        _gpu("p100", 9.3, 16, 732, 16),
        _gpu("v100", 15.7, 32, 900, 150),
        _gpu("t4", 8.1, 16, 320, 16),
        _gpu("l4", 30.3, 24, 300, 32),
        _gpu("a100", 156, 80, 2039, 300),
        _gpu("h100", 494, 80, 3350, 450),
        _gpu("tpu_v2_core", 23, 8, 350, 62),
        _gpu("tpu_v3_core", 61.5, 16, 450, 82),
    )
}


def machine_of(machine: str | Machine | None) -> Machine:
    """A machine, or the one of this name.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, str) and machine in MACHINES:
        return MACHINES[machine]
    raise ValueError(
        f"`machine` must be one of {sorted(MACHINES)}, or a "
        f"`tfgpipe.Machine`. Received: machine={machine!r}. Describe another "
        "kind: `tfgpipe.Machine(flops=..., memory=..., memory_bandwidth=..., "
        "bandwidth=...)`."
    )


def machine_named(name: str) -> Machine | None:
    """What a maker's name of a device stands for, or None.

    The figures are those of the kind; the memory that of the name, if it says.

    Example:

    >>> machine_named("NVIDIA A100-SXM4-40GB").memory / 2**30
    40.0
    >>> machine_named("Radeon VII")
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    known = next((MACHINES[word] for word in words if word in MACHINES), None)
    if "mig" in words:  # a part of one
        return None
    size = re.search(r"\b(\d+) ?gb\b", name.lower())
    if known is None or size is None:
        return known
    return dataclasses.replace(known, memory=int(size[1]) * 2.0**30)
