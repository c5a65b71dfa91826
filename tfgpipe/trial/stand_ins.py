"""Finds calls that a trial need not run: they are of equal blocks.

    the model      embed | block 0 | block 1 | block 2 | head
    a trial runs   embed | block 0 | ------- | ------- | head
                              +--------------------------^

Block 0 stands in for all blocks: their calls return what its calls have
returned. Its layers show what theirs would, and the head gets what it would get
of a model with one block.

Blocks are equal if a step's graph says so, with what it adds to the loss and
assigns; if their layers are alike; and if weights that may switch something on
or off have equal values.
"""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import Call, Section, SectionCall
from tfgpipe.graphs import BlockKeys, Repeat, TracedModel
from tfgpipe.trial.units import Unit

# Fewer blocks are all run: to leave some out takes a run more.
_LEAST_BLOCKS = 4

# Of a matrix that is compared.
_FEW = 4096

# Attributes that equal layers may have different values of.
_NAMES = {
    "name",
    "_name",
    "_path",
    "_parent_path",
    "_self_update_uid",
    "seed",
    internals.HOME,
}


def stand_ins_of(
    traced: TracedModel,
    steps: Sequence[SectionCall],
    repeats: Sequence[Repeat],
    differentiating: set[Unit],
) -> dict[Call, Call]:
    """Returns the calls of equal blocks, each with its first block's call.

    Args:
        traced: The graph of a step.
        steps: The steps of the model.
        repeats: The runs of equal blocks of these steps.
        differentiating: Units with gradients of their own, which the graph of
            a forward pass does not tell.
    """
    repeats = [one for one in repeats if one.num_blocks >= _LEAST_BLOCKS]
    if not repeats:
        return {}
    stand_ins: dict[Call, Call] = {}
    places = {_call(s): i for i, s in reversed([*enumerate(traced.sections)])}
    firsts = [places.get(_call(step.section)) for step in steps]
    ends = [*firsts, len(traced.sections) - 1]
    calls = collections.Counter(id(s.operation) for s in traced.sections)
    # Of shared layers, a call is known by its number alone.
    special = {
        i
        for i, section in enumerate(traced.sections)
        if calls[id(section.operation)] > 1
    }.union(*(unit.sections for unit in differentiating))
    keys = BlockKeys(traced)
    for repeat in repeats:
        bounds = [end for i in repeat.bounds() if (end := ends[i]) is not None]
        if (
            len(bounds) <= repeat.num_blocks
            or sorted(bounds) != bounds
            or special & {*range(bounds[0], bounds[-1])}
        ):
            continue
        blocks = [traced.sections[a:b] for a, b in itertools.pairwise(bounds)]
        operations = [
            traced.operations[
                traced.sections[a].start : traced.sections[b].start
            ]
            for a, b in itertools.pairwise(bounds)
        ]
        if not _are_chained(traced, operations):
            continue
        texts = [keys.key(ops) for ops in operations]
        facts = [_facts_of_graph(traced, ops) for ops in operations]
        inputs = [*map(_inputs, operations[:-1], operations[1:])]
        equal = 1
        while equal < len(blocks) and (
            (texts[equal], facts[equal]) == (texts[0], facts[0])
            and inputs[equal - 1] == inputs[0]
            and _are_alike(blocks[0], blocks[equal])
        ):
            equal += 1
        for a, block in zip(bounds[1:equal], blocks[1:equal]):
            stand_ins.update(
                (_call(section), _call(first))
                for i, (first, section) in enumerate(zip(blocks[0], block), a)
                if _end(traced.sections, i) <= bounds[equal]
            )
    return stand_ins


def _call(section: Section) -> Call:
    return id(section.operation), section.call


def _end(sections: Sequence[Section], i: int) -> int:
    """Returns the section that begins behind a call with all that it calls."""
    around = sections[i].around
    inside = itertools.takewhile(
        lambda section: section.around[: len(around)] == around, sections[i:]
    )
    return i + len([*inside])


def _are_chained(
    traced: TracedModel, blocks: Sequence[Sequence[tf.Operation]]
) -> bool:
    """Returns whether each block takes results of the one before alone.

    And of what is before all of them; and whether the last one's alone go on.
    What looks up rows is not passed over: each lookup is known by its place.
    """
    block_of = {op.name: i for i, ops in enumerate(blocks) for op in ops}
    for op in traced.operations:
        block = block_of.get(op.name, len(blocks))
        for tensor in op.inputs:
            maker = block_of.get(tensor.op.name)
            if maker is not None and maker not in (block - 1, block):
                return False
    return not any(
        op.name in block_of for *_, op in traced.all_lookups()
    ) and not any(
        block_of.get(t.op.name, len(blocks)) < len(blocks) - 1
        for t in traced.handed_out
        if t is not None
    )


def _inputs(
    before: Sequence[tf.Operation], block: Sequence[tf.Operation]
) -> list[tuple[int, int]]:
    """Returns which results of the block before a block takes, in order."""
    number = {op.name: i for i, op in enumerate(before)}
    return [
        (number[t.op.name], t.value_index)
        for op in block
        for t in op.inputs
        if t.op.name in number
    ]


def _facts_of_graph(
    traced: TracedModel, block: Sequence[tf.Operation]
) -> list[Any]:
    """Returns what a block adds to the loss, assigns, and is switched by.

    Vectors and smaller weights may be switches, and matrices of one value. Of
    other weights a trial draws those that are zero, and all differ after some
    training.
    """
    number = {op.name: i for i, op in enumerate(block)}
    facts: list[Any] = [
        number[t.op.name] for t in traced.losses if t.op.name in number
    ]
    facts.append(None)
    facts += [
        number[t.op.name] for _, t in traced.new_state if t.op.name in number
    ]
    pairs = [(use.variable, use.tensor) for use in traced.uses]
    for variable, tensor in [*pairs, *traced.state]:
        if tensor.op.name not in number or id(variable) in traced.draws:
            continue
        if len(variable.shape) < 2:
            facts.append(variable.numpy().tobytes())
        elif np.prod(variable.shape) <= _FEW:
            values = np.unique(variable.numpy())
            facts.append(values.tobytes() if len(values) == 1 else None)
    return facts


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
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))
