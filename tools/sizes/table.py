"""Prints what models and their devices need, without allocating any of it."""

import params
from params import Experiment
from tools.sizes.model_size import device_sizes, num_parameters
from tools.sizes.parameter_counts import PARAMETER_COUNTS


def print_device_sizes(
    experiment: Experiment, num_devices: int | None, num_replicas: int
) -> None:
    """Prints a table of a replica's devices, one line each, in GiB.

    Args: as of `device_sizes`.
    """
    devices = device_sizes(experiment, num_devices, num_replicas)
    flops = sum(device.flops for device in devices) or 1.0
    replicas = f" of each of {num_replicas} replicas"
    print(
        f"{sum(device.num_params for device in devices):,} parameters, in "
        f"{experiment.num_partitions} cells on {len(devices)} devices"
        f"{replicas if num_replicas > 1 else ''}; "
        f"{experiment.num_micro_batches} micro-batches; "
        f"schedule={experiment.schedule}; remat={experiment.remat}; "
        f"FLOPs of one example: {flops:.3g}\n"
    )
    rows = [
        "device,cells,layers,from,to,params,FLOPs,weights,slots,gradients,"
        "activations,GiB".split(",")
    ]
    for index, device in enumerate(devices):
        parts = (
            device.weight_bytes,
            device.slot_bytes,
            device.gradient_bytes,
            device.activation_bytes,
            device.total_bytes,
        )
        rows.append(
            [
                str(index),
                ",".join(map(str, device.cells)),
                str(sum(map(len, device.layers))),
                ",".join(layers[0] for layers in device.layers),
                ",".join(layers[-1] for layers in device.layers),
                f"{device.num_values:,}",
                f"{device.flops / flops:.0%}",
                *(f"{part / 2**30:.2f}" for part in parts),
            ]
        )
    _print_aligned(rows)


def _print_aligned(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.ljust(width) if column in (1, 3, 4) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())


def print_experiments() -> None:
    """Prints every experiment; no model is made that is of this package."""
    row = "{:<35}{:>15}{:>5}  {:<18} {}"
    print(row.format("name", "parameters", "K", "data", "expected result"))
    for experiment in params.all_experiments():
        known = PARAMETER_COUNTS.get(experiment.name)
        line = row.format(
            experiment.name,
            f"{num_parameters(experiment) if known is None else known:,}",
            experiment.num_partitions,
            experiment.data.name,
            experiment.expected_result,
        )
        print(line)
