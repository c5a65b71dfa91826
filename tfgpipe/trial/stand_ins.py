"""Finds calls of which a trial need not run all: those of equal blocks.

    the model      embed | block 0 | block 1 | block 2 | head
    a trial runs   embed | block 0 | ------- | ------- | head
                              +--------------------------^

Block 0 stands in for all blocks: their calls return what its calls have
returned. Its layers show what theirs would, and the head gets what it would get
of a model with one block.
"""

from __future__ import annotations

import bisect
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfgpipe import internals
from tfgpipe.cells import Call, Section, SectionCall
from tfgpipe.graphs import Repeat, TracedModel

# Fewer blocks are all run: to leave some out takes a run more.
_LEAST_BLOCKS = 4

# Attributes that equal layers may have different values of.
_NAMES = {"name", "_name", "_path", "_parent_path", "_self_update_uid", "seed"}


def stand_ins_of(
    traced: TracedModel,
    steps: Sequence[SectionCall],
    repeats: Sequence[Repeat],
) -> dict[Call, Call]:
    """Returns the calls of equal blocks, and those of the first of each.

    Args:
        traced: A run of the model.
        steps: The steps of that run.
        repeats: The runs of equal blocks of these steps.
    """
    stand_ins: dict[Call, Call] = {}
    ids = [*map(id, traced.sections)]
    first_sections = [ids.index(id(step.section)) for step in steps]
    ends = [*first_sections, len(traced.sections) - 1]
    for repeat in repeats:
        bounds = [ends[i] for i in repeat.bounds()]
        if repeat.num_blocks < _LEAST_BLOCKS or not _are_chained(
            traced, bounds
        ):
            continue
        first, *others = (
            traced.sections[a:b] for a, b in itertools.pairwise(bounds)
        )
        facts = _values(traced, bounds)
        for i, block in enumerate(others, 1):
            if not _are_alike(first, block) or facts[i] != facts[0]:
                break
            stand_ins.update(zip(map(_call, block), map(_call, first)))
    return stand_ins


def _call(section: Section) -> Call:
    return id(section.operation), section.call


def _are_chained(traced: TracedModel, bounds: Sequence[int]) -> bool:
    """Returns whether each block takes results of the one before alone.

    And of what is before all of them; and whether the last one's alone go on.
    What looks up rows is not passed over: each lookup is known by its place.
    """
    places = traced.places

    def block_at(place: int) -> int:
        """Returns the number of the block, from 1 on; 0 before them."""
        return bisect.bisect_right(bounds, traced.section_at(place))

    for place, op in enumerate(traced.operations):
        block = block_at(place)
        for tensor in op.inputs:
            maker = block_at(places[tensor.op.name])
            if maker and maker not in (block - 1, block):
                return False
    lookups = (op for *_, op in traced.all_lookups())
    return not any(
        1 < block_at(places[op.name]) < len(bounds) for op in lookups
    )


def _values(
    traced: TracedModel, bounds: Sequence[int]
) -> list[list[tuple[Any, ...]]]:
    """Returns for each block what its variables may switch on or off.

    Those are scalars, and vectors that are not trained. Of all others a trial
    draws what is zero, and more would differ after any training.
    """
    values: list[list[tuple[Any, ...]]] = [[] for _ in bounds]
    pairs = [(use.variable, use.tensor) for use in traced.uses]
    for variable, tensor in [*pairs, *traced.state]:
        section = traced.section_at(traced.places[tensor.op.name])
        rank = len(variable.shape)
        is_seed = id(variable) in traced.draws
        if rank < 2 - internals.is_trained(variable) and not is_seed:
            value = variable.numpy()
            block = bisect.bisect_right(bounds, section)
            values[block - 1].append((value.shape, value.tobytes()))
    return values


def _are_alike(first: Sequence[Section], block: Sequence[Section]) -> bool:
    """Returns whether calls are of layers that are alike."""
    return len(first) == len(block) and all(
        a.operation is not None
        and b.operation is not None
        and [*_facts(a.operation)] == [*_facts(b.operation)]
        for a, b in zip(first, block)
    )


def _facts(operation: keras.Operation) -> Iterator[Any]:
    """Yields the class of a layer, and its plain attributes, but names.

    Functions are those that were handed to it: Keras wraps its methods.
    """
    yield type(operation)
    yield {
        name: value
        for name, value in vars(operation).items()
        if name not in _NAMES
        and (_is_plain(value) or _is_handed_to(operation, name, value))
    }


def _is_handed_to(operation: keras.Operation, name: str, value: Any) -> bool:
    is_function = isinstance(value, types.FunctionType)
    return is_function and not hasattr(type(operation), name)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
