"""What a user sees of the cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class CellRecord:
    """What one cell of a `GPipe` holds.

    Attributes:
        index: Position in the pipeline, from 0.
        layers: Names of the layers, in order.
        device: Full name of the device that runs it; of the first, if there
            are replicas.
        cost: Sum of the layers' costs, in their unit; by default FLOPs of one
            forward pass of one example.
        num_params: Scalars in all variables that were created for this cell. A
            variable that cells share counts in the first of them.
        devices: Full names of the devices that run it, one a replica. They
            share out the weights.
        unit: Of the cost: "FLOPs", "s" or "bytes"; empty if the user gave it.
    """

    index: int
    layers: tuple[str, ...]
    device: str
    cost: float
    num_params: int
    devices: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    unit: str = dataclasses.field(default="", repr=False)


def print_cells(
    cells: list[CellRecord], print_fn: Callable[[str], object] | None = None
) -> None:
    """Prints a table of the cells: one line a layer, one more a cell.

    Args:
        cells: The cells.
        print_fn: Called with each line. Defaults to `print`.
    """
    write = print_fn or print
    total = sum(cell.cost for cell in cells)
    unit = f" ({cells[0].unit})" if cells[0].unit else ""
    rows = [("cell", "device", "layers", "params", f"cost{unit}", "share")]
    for cell in cells:
        share = cell.cost / total if total else 1 / len(cells)
        rows.append(
            (
                str(cell.index),
                " ".join(map(_short, cell.devices or (cell.device,))),
                cell.layers[0],
                f"{cell.num_params:,}",
                f"{cell.cost:.3g}",
                f"{share:.0%}",
            )
        )
        rows += [("", "", name, "", "", "") for name in cell.layers[1:]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        left = [c.ljust(w) for c, w in zip(row[:3], widths[:3])]
        right = [c.rjust(w) for c, w in zip(row[3:], widths[3:])]
        write("  ".join([*left, *right]).rstrip())


def _short(device: str) -> str:
    return device.removeprefix("/job:localhost/replica:0/task:0")
