"""Prints what models and their devices need, without allocating any of it."""

import itertools

import params
from params import Experiment
from tfgpipe.costs import LayerSize
from tfgpipe.plans import Prediction
from tfgpipe.profiles import aligned
from tools.sizes.model_size import num_parameters, predicted
from tools.sizes.parameter_counts import PARAMETER_COUNTS

_GIB = 2**30


def print_device_sizes(
    experiment: Experiment, num_devices: int | None, num_replicas: int
) -> None:
    """Prints a table of a replica's devices, one line each, in GiB."""
    sizes, prediction = predicted(experiment, num_devices, num_replicas)
    setting = prediction.setting
    flops = sum(size.flops for size in sizes)
    replicas = f" of each of {num_replicas} replicas"
    print(
        f"{sum(size.num_params for size in sizes):,} parameters, in "
        f"{setting.num_partitions} cells on {setting.num_devices} devices"
        f"{replicas if num_replicas > 1 else ''}; "
        f"{setting.num_micro_batches} micro-batches; "
        f"schedule={setting.schedule}; remat={experiment.remat}; "
        f"FLOPs of one example: {flops:.3g}\n"
    )
    rows = [
        "device,cells,layers,from,to,params,FLOPs,weights,slots,gradients,"
        "activations,working,GiB".split(",")
    ]
    rows += _device_rows(sizes, prediction)
    print("\n".join(aligned(rows, (1, 3, 4))))


def _device_rows(
    sizes: list[LayerSize], prediction: Prediction
) -> list[list[str]]:
    setting = prediction.setting
    layers = iter(sizes)
    cells = [
        [*itertools.islice(layers, count)] for count in setting.layers_per_cell
    ]
    flops = sum(size.flops for size in sizes) or 1.0
    rows = []
    for device, memory in enumerate(prediction.memory):
        numbers = range(device, len(cells), setting.num_devices)
        own = [cells[k] for k in numbers]
        held = [size for cell in own for size in cell]
        rows.append(
            [
                str(device),
                ",".join(map(str, numbers)),
                str(len(held)),
                ",".join(cell[0].name for cell in own),
                ",".join(cell[-1].name for cell in own),
                f"{sum(size.num_values for size in held):,}",
                f"{sum(size.flops for size in held) / flops:.0%}",
                *(f"{part / _GIB:.2f}" for part in (*memory, memory.total)),
            ]
        )
    return rows


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
