"""Prints what models and their cells need, without allocating any of it."""

import params
from params import Experiment
from tools.model_size import cell_sizes, num_parameters


def print_cell_sizes(experiment: Experiment) -> None:
    """Prints a table of the cells, one line each, in GiB."""
    cells = cell_sizes(experiment)
    flops = sum(cell.flops for cell in cells) or 1.0
    print(
        f"{sum(cell.num_params for cell in cells):,} parameters, in "
        f"{len(cells)} cells; {experiment.num_micro_batches} micro-batches; "
        f"remat={experiment.remat}; FLOPs of one example: {flops:.3g}\n"
    )
    rows = [
        "cell,layers,from,to,params,FLOPs,weights,slots,gradients,"
        "activations,GiB".split(",")
    ]
    for index, cell in enumerate(cells):
        parts = (
            cell.weight_bytes,
            cell.slot_bytes,
            cell.gradient_bytes,
            cell.activation_bytes,
            cell.total_bytes,
        )
        rows.append(
            [
                str(index),
                str(len(cell.layers)),
                cell.layers[0],
                cell.layers[-1],
                f"{cell.num_values:,}",
                f"{cell.flops / flops:.0%}",
                *(f"{part / 2**30:.2f}" for part in parts),
            ]
        )
    _print_aligned(rows)


def _print_aligned(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.ljust(width) if column in (2, 3) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())


def print_experiments() -> None:
    """Prints every experiment; no weight is allocated."""
    row = "{:<35}{:>15}{:>5}  {:<18} {}"
    print(row.format("name", "parameters", "K", "data", "expected result"))
    for experiment in params.all_experiments():
        line = row.format(
            experiment.name,
            f"{num_parameters(experiment):,}",
            experiment.num_partitions,
            experiment.data.name,
            experiment.expected_result,
        )
        print(line, flush=True)  # large ones take a while
