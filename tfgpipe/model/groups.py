"""Groups of a cell's steps: each has functions of its own, and is a `Cell`.

A group is computed again at once. Where XLA compiles, it is a region, of which
equal ones are compiled once; a head in parts is one, too, and each shard of a
layer that several devices compute.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfgpipe import failures
from tfgpipe.arguments import Arguments
from tfgpipe.cells import WITH_COLUMNS, Cell, is_named, num_columns
from tfgpipe.costs import row_bytes
from tfgpipe.devices import names, placement
from tfgpipe.partition import cut_graph, partition, steps_of_head
from tfgpipe.profiles import aligned
from tfgpipe.schedules import Remat

# Bytes that a cell makes of a row: below, no groups. How many there may be, and
# what of the bytes more of them may leave.
_LITTLE = 2**20
_NUM_GROUPS = (2, 4, 8)
_WORTH = 0.8

# It is told that devices wait for a layer for more of a step than this, where a
# step takes time: with fewer FLOPs of a row, forward, a hundred rows take as
# long as tasks take to start, which is milliseconds.
_WAITING = 1 / 3
_FEW_FLOPS = 1e6


def shared_out(arguments: Arguments, costs: Sequence[float]) -> list[float]:
    """Returns what the steps cost the devices of their cells."""
    shards = sharded(arguments)
    return [
        cost / arguments.num_shards(shards.get(id(step.operation)))
        for cost, step in zip(costs, arguments.source.steps)
    ]


def grouped_cells(
    arguments: Arguments,
    counts: Sequence[int],
    costs: Sequence[float],
    specs: tuple[Any, Any],
    compiles: bool,
) -> tuple[tuple[Cell, ...], Remat]:
    """The groups of all cells, each as a cell, and their rules.

    `counts` are the steps of the user's cells; `specs` describe the model's
    inputs and outputs.
    """
    source, shards = arguments.source, sharded(arguments)
    costs = shared_out(arguments, costs)
    input_spec, output_spec = specs
    regions = None  # where those begin, or end, that XLA compiles
    if compiles or names.only_compiles(arguments.devices):
        regions = arguments.region_bounds(input_spec)
    cells: list[Cell] = []
    start, has_before = 0, False
    columns = zip(*arguments.grid)
    # A row of the grid is a replica; column k has the devices of cell k.
    for k, (devices, count) in enumerate(zip(columns, counts)):
        stop = start + count
        groups = _groups(arguments, costs, start, stop, k, regions)
        sizes = [(size, 1) for size in groups]
        if arguments.head_parts > 1 and stop == len(costs):
            of_last, _ = sizes.pop()
            live = source.live_bytes[stop - of_last : stop]
            of_head = steps_of_head(live, row_bytes(output_spec))
            sizes += [(of_last - of_head, 1), (of_head, arguments.head_parts)]
        stores = arguments.stores_of(devices)
        for size, head_parts in filter(operator.itemgetter(0), sizes):
            steps = source.steps[start : start + size]
            start += size
            is_end = start == len(costs)
            of_shards = [s for s in steps if id(s.operation) in shards]
            if head_parts > 1 and of_shards:
                raise ValueError(
                    "`head_parts` must be 1 where layers of the head have "
                    f"`shards`: {[step.section.name for step in of_shards]}."
                )
            for together, layer in apart(steps, shards, has_before, is_end):
                index = len(cells)
                cell = Cell(index, together, devices, k, stores, head_parts)
                has_before = layer is None
                if has_before:
                    cells.append(cell)
                else:
                    cells += shard_cells(arguments, shards[id(layer)], cell)
    groups_of_cells = collections.Counter(cell.number for cell in cells)
    remat = arguments.remat_by_cell([*groups_of_cells.values()])
    if regions is not None:
        remat = remat.compiled(arguments.num_micro_batches)
    return tuple(cells), remat


def _groups(
    arguments: Arguments,
    costs: Sequence[float],
    start: int,
    stop: int,
    k: int,
    regions: Sequence[int] | None,
) -> list[int]:
    """How many steps each group of cell k has.

    A group has functions of its own, and is computed again at once. With more
    groups, the inputs of more are held of each micro-batch, and of one
    micro-batch less is there at a time. Where XLA compiles, groups are regions.
    """
    source, count = arguments.source, stop - start
    costs = costs[start:stop]
    made, live = source.made_bytes[start:stop], source.live_bytes[start:stop]
    asked = arguments.remat_groups
    if asked is not None:
        if regions is None:
            return partition(costs, asked)
        others = {*range(count)} - {i - start for i in regions}
        return cut_graph(costs, live, asked, others)
    if regions is not None and arguments.weights_on == "devices":
        inner = [i for i in regions if start < i < stop]
        return [b - a for a, b in itertools.pairwise([start, *inner, stop])]
    is_small = sum(made) < _LITTLE
    # Weights of elsewhere would be sent again for each group.
    is_sent = arguments.weights_on != "devices"
    if is_small or is_sent or not arguments.rules.recomputes(k):
        return [count]
    held = arguments.held[k]
    best, least = [count], float(sum(made))
    for num_groups in _NUM_GROUPS:
        if num_groups > count:
            break
        sizes = cut_graph(made, live, num_groups)
        ends = [*itertools.accumulate(sizes)]
        inputs = sum(live[end] for end in ends[:-1])
        largest = max(sum(made[a:b]) for a, b in zip([0, *ends], ends))
        if held * inputs + largest < _WORTH * least:
            best, least = sizes, held * inputs + largest
    return best


# ------------------------------------------------------------- layers in shards
def sharded(arguments: Arguments) -> dict[int, Any]:
    """Returns what was asked of layers with shards, by their ids."""
    by_layer: dict[int, Any] = {}
    for name, given in arguments.shards.items():
        count = arguments.num_shards(given)
        named = {
            id(step.operation): step.operation
            for step in arguments.source.steps
            if is_named(step.section, name)
        }
        sizes = [num_columns(layer, count) for layer in named.values()]
        if not named or min(sizes) < count:
            have = {
                step.section.name
                for step in arguments.source.steps
                if num_columns(step.operation, 2)
            }
            raise ValueError(
                "`shards` must name layers that the model calls, of "
                f"{WITH_COLUMNS}, not quantised, with as many columns: of "
                f"{sorted(have)}; or of a subclass that keeps Keras's `call` "
                "and says `is_column_wise = True`. Received: "
                f"{name!r}: {given!r}."
            )
        by_layer |= dict.fromkeys(named, given)
    return by_layer


def apart(
    steps: Sequence[Any],
    shards: Mapping[int, Any],
    has_before: bool,
    is_end: bool,
) -> Iterator[tuple[list[Any], Any]]:
    """Consecutive steps, and each layer with shards by itself.

    A cell without shards, which may have no steps, comes before each, and
    behind the last one of a model: what shards take is handed out in the one,
    and what they make is put together in the other. `has_before` says whether
    there is one before the first step.

    Yields:
        Steps, and the layer if it has shards.
    """
    together: list[Any] = []
    for step in steps:
        if id(step.operation) not in shards:
            together.append(step)
            continue
        if together or not has_before:
            yield together, None
        yield [step], step.operation
        together, has_before = [], False
    if together or (is_end and not has_before):
        yield together, None


def shard_cells(arguments: Arguments, given: Any, whole: Cell) -> list[Cell]:
    """The cells that compute a layer instead of one.

    Args:
        arguments: The arguments of the `GPipe`.
        given: What its `shards` say of the layer.
        whole: What would compute it alone, with the first index of these.
    """
    places = arguments.shard_devices(given, whole.number)
    stores = arguments.stores_of(whole.devices, of_shards=True)
    beside = range(whole.index, whole.index + len(places))
    return [
        Cell(
            index,
            [] if i else whole.steps,
            place,
            whole.number,
            stores,
            shards=beside,
            callers=whole.devices,
        )
        for i, (index, place) in enumerate(zip(beside, places))
    ]


def tell_of_large(
    arguments: Arguments, costs: Sequence[float], total: float
) -> None:
    """Warns of a layer for which devices wait, however the model is cut.

    `costs` are for one shard of each layer, `total` for all shards.
    """
    source = arguments.source
    num_devices = len({*arguments.grid[0]})
    cost, step = max(zip(costs, source.steps), key=lambda pair: pair[0])
    share = cost / (total or 1.0)
    waiting = 1 - 1 / max(1.0, share * num_devices)
    if waiting <= _WAITING or sum(source.flops) < _FEW_FLOPS:
        return
    # So many devices do not wait so long.
    fewer = max(1, math.floor(1 / (share * (1 - _WAITING))))
    failures.warn(
        f"With num_partitions={arguments.num_partitions}, devices wait for "
        f"layer '{step.layer.name}' for {waiting:.0%} of a step, as it has "
        f"{share:.0%} of the cost of all: pass num_partitions={fewer}, or "
        "`shards` for a layer that has columns."
    )


# ---------------------------------------------------------- what a user sees
@dataclasses.dataclass(frozen=True)
class CellRecord:
    """The contents of one cell of a `GPipe`.

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
        weight_bytes: Size of the variables that `num_params` counts.
    """

    index: int
    layers: tuple[str, ...]
    device: str
    cost: float
    num_params: int
    devices: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    unit: str = dataclasses.field(default="", repr=False)
    weight_bytes: int = dataclasses.field(default=0, repr=False)


def cell_records(
    cells: Sequence[Cell], costs: Sequence[float], unit: str
) -> list[CellRecord]:
    """Returns what each of the user's cells holds, in order."""
    records: list[CellRecord] = []
    start, counted = 0, set[int]()
    for number, (*parts,) in itertools.groupby(cells, lambda c: c.number):
        layers = [layer for part in parts for layer in part.sequence]
        weights = {id(w): w for layer in layers for w in layer.weights}
        uncounted = [w for key, w in weights.items() if key not in counted]
        counted.update(weights)
        stop = start + len(layers)
        records.append(
            CellRecord(
                number,
                tuple(layer.name for layer in layers),
                parts[0].device,
                sum(costs[start:stop]),
                sum(math.prod(w.shape) for w in uncounted),
                parts[0].devices,
                unit,
                sum(map(placement.tensor_bytes, uncounted)),
            )
        )
        start = stop
    return records


def print_cells(
    cells: list[CellRecord], print_fn: Callable[[str], object] | None = None
) -> None:
    """Prints a table of the cells: one line a layer, one more a cell.

    `print_fn` is called with each line; None for `print`.
    """
    total = sum(cell.cost for cell in cells)
    unit = f" ({cells[0].unit})" if cells[0].unit else ""
    rows = [["cell", "device", "layers", "params", f"cost{unit}", "share"]]
    local = "/job:localhost/replica:0/task:0"
    for cell in cells:
        share = cell.cost / total if total else 1 / len(cells)
        devices = cell.devices or (cell.device,)
        rows.append(
            [
                str(cell.index),
                " ".join(device.removeprefix(local) for device in devices),
                cell.layers[0],
                f"{cell.num_params:,}",
                f"{cell.cost:.3g}",
                f"{share:.0%}",
            ]
        )
        rows += [["", "", name, "", "", ""] for name in cell.layers[1:]]
    for line in aligned(rows, (0, 1, 2)):
        (print_fn or print)(line)
