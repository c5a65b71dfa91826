"""Which layers several devices compute: what `shards` asks for, checked.

And for which layers without them devices wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfgpipe import failures
from tfgpipe.arguments import Arguments
from tfgpipe.cells import (
    WITH_COLUMNS,
    Cell,
    computes_columns,
    is_named,
    num_columns,
)
from tfgpipe.devices import names

# It is told that devices wait for a layer for more of a step than this, where a
# step takes time: with fewer FLOPs of a row, forward, a hundred rows take as
# long as tasks take to start, which is milliseconds.
_WAITING = 1 / 3
_FEW_FLOPS = 1e6


def sharded(arguments: Arguments) -> dict[int, Any]:
    """Returns what was asked of layers with shards, by their ids.

    Raises:
        ValueError: If there is no such layer, or it has no columns.
    """
    calls = arguments.source.steps
    by_layer: dict[int, Any] = {}
    for name, given in arguments.shards.items():
        named = _named(arguments, name)
        if not named:
            have = dict.fromkeys(
                step.section.name
                for step in calls
                if num_columns(step.operation, 2)
            )
            raise ValueError(
                "`shards` must name layers that the model calls. Received: "
                f"{name!r}. Those that have columns: {[*have]}."
            )
        for key, layer in named.items():
            _check(layer, name, given, arguments.num_shards(given))
            if key in by_layer:
                raise ValueError(
                    "`shards` must name each layer once. Received: "
                    f"{[*arguments.shards]}, of which several are layer "
                    f"'{layer.name}'. Leave one of them out."
                )
            by_layer[key] = given
    return by_layer


def _check(layer: Any, name: str, given: Any, count: int) -> None:
    """Refuses layers that have not so many columns."""
    size = num_columns(layer, count)
    if size < count:
        cure = ""
        if not computes_columns(layer):
            cure = (
                "; or say `is_column_wise = True` in a subclass that keeps "
                "Keras's `call`, and whose columns need nothing of each other"
            )
        raise ValueError(
            "`shards` must be of layers that can be computed in columns: "
            f"{WITH_COLUMNS}, without quantisation; and at most as many as "
            f"there are columns. Received: {name!r}: {given!r}, and layer "
            f"'{layer.name}' of class {type(layer).__name__}, which has "
            f"{size}. Leave it out, or ask for fewer{cure}."
        )


def _shards_for(arguments: Arguments, step: Any, count: int) -> str | None:
    """Returns `shards` for a layer that has none, as text; None if it cannot.

    Args:
        arguments: The arguments of the `GPipe`.
        step: The call of the layer.
        count: How many shards there are at most.
    """
    layer = step.operation
    count = min(count, num_columns(layer, count))
    is_refused = (
        count < 2
        or arguments.head_parts > 1
        or names.only_compiles(arguments.devices)
        or id(layer) in sharded(arguments)
    )
    if is_refused:
        return None
    parts = step.section.name.split("/")
    ends = ["/".join(parts[i:]) for i in reversed(range(len(parts)))]
    unique = (end for end in ends if len(_named(arguments, end)) == 1)
    return f"{ {**arguments.shards, next(unique, ends[-1]): count} }"


def _named(arguments: Arguments, name: str) -> dict[int, Any]:
    """The layers of a name, by their ids."""
    return {
        id(step.operation): step.operation
        for step in arguments.source.steps
        if is_named(step.section, name)
    }


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


def check_whole(
    steps: Sequence[Any], shards: Mapping[int, Any], head_parts: int
) -> None:
    """Refuses layers with shards in a head whose rows are in parts."""
    names_of_shards = [
        s.section.name for s in steps if id(s.operation) in shards
    ]
    if names_of_shards:
        raise ValueError(
            "`head_parts` must be 1 where a layer of the head has `shards`. "
            f"Received: head_parts={head_parts} and shards of "
            f"{names_of_shards}. Pass one of the two."
        )


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
    source, k = arguments.source, arguments.num_partitions
    num_devices = len({*arguments.grid[0]})
    cost, step = max(zip(costs, source.steps), key=lambda pair: pair[0])
    share = cost / (total or 1.0)
    waiting = 1 - 1 / max(1.0, share * num_devices)
    if waiting <= _WAITING or sum(source.flops) < _FEW_FLOPS:
        return
    # So many devices do not wait so long.
    fewer = max(1, math.floor(1 / (share * (1 - _WAITING))))
    replicas = num_devices // fewer
    if shards := _shards_for(arguments, step, num_devices):
        cure = f"pass shards={shards}"
    elif arguments.num_replicas == 1 and replicas > 1:
        cure = (
            f"pass num_partitions={fewer}, or make it in the scope of "
            f"`tfgpipe.PipelineStrategy({replicas}, {fewer})`, which shares "
            "out rows"
        )
    else:
        cure = f"pass num_partitions={fewer}"
    failures.warn(
        f"With num_partitions={k}, devices wait for layer '{step.layer.name}' "
        f"for {waiting:.0%} of a step, as it has {share:.0%} of the cost of "
        f"all layers: {cure}."
    )
