"""Makes a case simpler, as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from case import Case

# Simplest values, in the order in which they are tried; the first that fails.
SIMPLEST: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"then": None}, {"then": "another K"}),
    ({"other_micro_batches": None}, {"other_replicas": None}),
    ({"toggle": None}, {"override": None}),
    ({"override": None}, {"bad_row": None}),
    ({"bad_row": None}, {"cells": None}),
    ({"cells": None},),
    ({"infers": False},),
    ({"metrics": (), "weighted_metrics": ()}, {"metrics": ()}),
    ({"weighted_metrics": ()},),
    ({"optimizer": {"name": "SGD"}},),
    ({"source": "arrays"},),
    ({"weights": None},),
    ({"loss_weights": None},),
    ({"reduction": None},),
    ({"losses": "MeanSquaredError", "labels": None},),
    ({"frozen": ()},),
    ({"explicit_input": False},),
    ({"remat_groups": 1, "cut_seed": 0},),
    ({"cut_seed": 0},),
    ({"schedule": "gpipe"},),
    ({"num_replicas": 1},),
    ({"num_micro_batches": 1}, {"num_micro_batches": 2}),
    ({"num_partitions": 1}, {"num_partitions": 2}),
    ({"other_partitions": 1}, {"other_partitions": 2}),
    ({"remat": "except_last"},),
    ({"weights_on": "devices"},),
    ({"head_parts": 1},),
    ({"shards": 1},),
    ({"other_remat": "except_last"},),
    ({"epochs": 1},),
    ({"rows": 6, "batch_size": 6},),
    ({"inputs": "vector"},),
    ({"dtype": "float64"},),
    ({"jit_compile": False},),
)


def shrink(
    case: Case, fails: Callable[[Case], bool], most: int = 60
) -> tuple[Case, int]:
    """A smallest case that fails, and how many were tried.

    Args:
        case: One that fails.
        fails: Whether a simpler one still does, in the same way.
        most: How many to try.
    """
    tried, before = 0, None
    while before != case:
        before = case
        for change in _CHANGES:
            for simpler in change(case):
                if simpler == case:
                    break  # those that follow are not simpler
                if tried == most:
                    return case, tried
                tried += 1
                if fails(simpler):
                    case = simpler
                    break
    return case, tried


def _fewer_layers(case: Case) -> Iterator[Case]:
    count = len(case.layers)
    sizes = sorted({max(1, count // 2), 1}, reverse=True)
    for size in sizes:
        for start in range(count - size, -1, -1):
            left = case.layers[:start] + case.layers[start + size :]
            if left:
                yield _with(case, left)


def _plainer_layers(case: Case) -> Iterator[Case]:
    for i, spec in enumerate(case.layers):
        for key, value in spec.options.items():
            if key == "layers":
                for j in range(len(value)):
                    inner = value[:j] + value[j + 1 :]
                    if inner:
                        yield _with_spec(case, i, {**spec.options, key: inner})
            elif key.endswith(("regularizer", "constraint")) or key in (
                "activation",
                "frozen",
            ):
                rest = {k: v for k, v in spec.options.items() if k != key}
                yield _with_spec(case, i, rest)


def _with_spec(case: Case, i: int, options: Any) -> Case:
    layers = list(case.layers)
    layers[i] = dataclasses.replace(layers[i], options=options)
    return _with(case, layers)


def _with(case: Case, layers: Any) -> Case:
    """With other layers; only those that are left can be frozen."""
    names = {spec.name for spec in layers}
    frozen = tuple(name for name in case.frozen if name in names)
    # In a graph, those that took a layer take what it took first.
    before = {spec.name: spec.takes for spec in case.layers if spec.takes}

    def left(name: str) -> str:
        while name in before and name not in names:
            name = before[name][0]
        return name

    found = tuple(
        dataclasses.replace(spec, takes=tuple(map(left, spec.takes)))
        for spec in layers
    )
    outputs = case.outputs and tuple(map(left, case.outputs))
    return dataclasses.replace(
        case, layers=found, frozen=frozen, outputs=outputs
    )


def _values(choices: Any) -> Callable[[Case], list[Case]]:
    return lambda case: [dataclasses.replace(case, **c) for c in choices]


_LAYERS = (_fewer_layers,) * 6
_CHANGES: tuple[Callable[[Case], Iterable[Case]], ...] = (
    *_LAYERS,
    *map(_values, SIMPLEST),
    _plainer_layers,
    _plainer_layers,
)
