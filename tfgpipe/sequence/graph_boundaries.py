"""An order of the calls in a model's graph, and what is alive between them.

A tensor that is used later travels along, so that the calls are a row of steps:

    x --> conv --> pool --> conv --> upsample --> concatenate --> y
            |________________________________________|

    before pool, the output of conv is alive; before the second conv, that of
    pool as well.

What is alive is what crosses if a cell begins there.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from keras import tree

from tfgpipe import internals
from tfgpipe.cells import CallOutput, LiveCall, LiveInput
from tfgpipe.sequence.graph_calls import ModelCall, ModelTensor, values_in
from tfgpipe.trial import Uses, uses_of


class GraphBoundaries:
    """Calls in an order, and what is alive between them.

    Attributes:
        live_bytes: Bytes of a row that are alive before each step.
        specs: The tensors that are.
    """

    def __init__(
        self,
        inputs: list[ModelTensor],
        calls: Sequence[ModelCall],
        outputs: Any,
    ):
        self.calls = calls
        self._outputs = outputs
        uses: dict[ModelTensor, list[int]] = collections.defaultdict(list)
        for i, call in enumerate(calls):
            for value in call.inputs:
                uses[value].append(i)
        for value in values_in(outputs):
            uses[value].append(len(calls))
        self._live = [list(inputs)]  # before each step
        for i, call in enumerate(calls):
            alive = [*self._live[-1], *call.outputs]
            self._live.append([v for v in alive if max(uses[v], default=0) > i])
        self.live_bytes = [
            sum(v.row_bytes for v in live) for live in self._live[:-1]
        ]
        self.specs = [tuple(v.spec for v in live) for live in self._live[:-1]]

    def steps(self) -> list[LiveCall]:
        """The calls, on what is alive before them."""
        found = []
        for i, call in enumerate(self.calls):
            before = {id(v): LiveInput(j) for j, v in enumerate(self._live[i])}
            made = {id(v): CallOutput(j) for j, v in enumerate(call.outputs)}
            is_last = i == len(self.calls) - 1
            gives = self._outputs if is_last else tuple(self._live[i + 1])
            found.append(
                LiveCall(
                    call.operation,
                    tree.map_structure(_replaced(before), call.args),
                    tree.map_structure(_replaced(before), call.kwargs),
                    tree.map_structure(_replaced({**before, **made}), gives),
                )
            )
        return found

    def together(self) -> set[int]:
        """Steps with which no cell can begin, see `ModelGraph`."""
        uses = collections.defaultdict(list)
        for i, call in enumerate(self.calls):
            for key in internals.state_of(call.operation).updated:
                uses[key].append(i)
        return {
            i for own in uses.values() for i in range(own[0] + 1, own[-1] + 1)
        }


def depth_first(calls: list[ModelCall], outputs: Any) -> list[ModelCall]:
    """Each call shortly before what needs it; then what nothing needs."""
    makers = {value: call for call in calls for value in call.outputs}
    needed = {value for call in calls for value in call.inputs}
    unused = [value for value in makers if value not in needed]
    roots = dict.fromkeys([*values_in(outputs), *unused])
    found: dict[int, ModelCall] = {}
    stack = [(makers.get(value), False) for value in reversed(roots)]
    while stack:
        call, is_ready = stack.pop()
        if call is None or id(call) in found:
            continue
        if is_ready:
            found[id(call)] = call
            continue
        stack.append((call, True))
        stack += [(makers.get(v), False) for v in reversed(call.inputs)]
    return list(found.values())


def in_turn(calls: Sequence[ModelCall], others: Sequence[ModelCall]) -> bool:
    """Whether calls find the state that they find in another order.

    What a call reads may be assigned by another, of another layer, too: which
    variables each uses shows when it runs.
    """
    uses: dict[int, Uses] = {}
    for call in calls:
        seen = _seen(call)
        if seen is None:
            return False
        uses[id(call)] = seen
    assigned = {key for own in uses.values() for key in own.assigned}

    def users(order: Sequence[ModelCall]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = collections.defaultdict(list)
        for call in order:
            for key in assigned & uses[id(call)].all:
                found[key].append(id(call))
        return found

    return users(calls) == users(others)


def _seen(call: ModelCall) -> Uses | None:
    """The variables that a call uses; None if that can't be told."""

    def arguments(tensors: list[Any]) -> Any:
        by = dict(zip(map(id, call.inputs), tensors))
        return tree.map_structure(_replaced(by), (call.args, call.kwargs))

    specs = [value.spec for value in call.inputs]
    return uses_of(call.operation, specs, arguments)


def _replaced(by: dict[int, Any]) -> Any:
    return lambda leaf: by.get(id(leaf), leaf)
