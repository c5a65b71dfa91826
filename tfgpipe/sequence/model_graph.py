"""A functional model as steps, each a call of one of its layers.

The calls are in Keras's own order; or depth first, where fewer bytes are alive
between steps then, and no call finds other state or other masks. A tensor that
is used later travels along, so that the calls are a row of steps:

    x --> conv --> pool --> conv --> upsample --> concatenate --> y
            |________________________________________|

    before pool, the output of conv is alive; before the second conv, that of
    pool as well.

What is alive is what crosses if a cell begins there.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import CallOutput, LiveCall, LiveInput
from tfgpipe.costs import PlacedCall
from tfgpipe.costs import cost as cost_lib
from tfgpipe.partition import cut_graph
from tfgpipe.sequence.graph_calls import (
    GraphCalls,
    ModelCall,
    ModelTensor,
    values_in,
)
from tfgpipe.sequence.layer_list import called_model
from tfgpipe.sequence.restrictions import check_model_rows
from tfgpipe.trial import Uses, calls_undone, uses_of


class ModelGraph:
    """The steps of a functional model.

    Attributes:
        layers: Those of the model, in the order of its weights.
        steps: Calls of its layers and operations, in order.
        costs: For each what the user said of its cost, or None.
        specs: For each, shapes and dtypes of the tensors that come in.
        live_bytes: For each, the bytes of a row of them.
        input_spec: The model's inputs, a nest of `keras.KerasTensor`s.
        problems: What is wrong.
        models: The model alone, see `LayerList`.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.models = [model]
        self.layers = internals.direct_layers(model)
        self.input_spec = model.input
        self.problems = _problems(model)
        self._calls = calls = GraphCalls(model)
        row, other = (
            GraphBoundaries(calls.inputs, order, calls.outputs)
            for order in (
                calls.found,
                depth_first(calls.found, calls.outputs),
            )
        )
        is_smaller = sum(other.live_bytes) < sum(row.live_bytes)
        may_turn = is_smaller and not calls.has_masks
        if may_turn and in_turn(row.calls, other.calls):
            row = other
        self.steps = row.steps()
        for step in self.steps:
            step.graph = self
        self.costs: list[Any] = [None] * len(self.steps)
        self.specs = row.specs
        self.live_bytes = row.live_bytes
        self._together = row.together()
        self._checked: set[Any] = set()  # shapes of inputs

    def call(self, x: Any, training: bool) -> Any:
        """Calls the model."""
        return called_model(self.model, x, training)

    def with_costs(self, costs: list[Any]) -> ModelGraph:
        """The same graph, of whose steps the user says other costs."""
        graph = copy.copy(self)
        graph.costs = costs
        return graph

    def check_again(self) -> None:
        """Lets `check` try layers again, which may have been changed."""
        self._checked.clear()

    def check(self, spec: Any, num_rows: int | None) -> None:
        """Refuses layers that compute something else than when opened.

        `spec` is what a step is traced for, in the structure of the inputs, and
        `num_rows` the mini-batch's number of rows if it is known then.

        Raises:
            ValueError: If one does.
        """
        specs = tree.flatten(spec)
        shapes = [(num_rows, *s.shape[1:]) for s in specs if s is not None]
        key = tuple(None if s is None else s.shape[1:] for s in specs), num_rows
        if key in self._checked:
            return
        with internals.outside_functions(), internals.recording():
            found = self._calls.differing(specs, num_rows)
        if found:
            raise ValueError(
                "The layers of a model must compute what they did when the "
                f"`GPipe` was made of it. Received: {found}, of model "
                f"'{self.model.name}', which do not for inputs of shapes "
                f"{shapes}. If their "
                "attributes were changed since, or layers added to a model "
                "inside, do that first, then make the `GPipe`. If their code "
                "looks at sizes, name the sizes in `keras.Input`, so that they "
                "are known then."
            )
        self._checked.add(key)

    def infer(self, spec: Any, is_split: bool) -> tuple[Any, list[float]]:
        """The model's outputs, and the costs of the steps."""
        if is_split:
            self._check_rows()
        known: dict[Any, Any] = {}
        costs = []
        example = cost_lib.example_of(self.specs[0])
        with internals.in_no_graph(internals.flat_layers(self.model)):
            # An example may be several rows behind a layer that reshapes.
            for i, (step, cost) in enumerate(zip(self.steps, self.costs)):
                made = self._estimated(i, cost, example, known)
                costs.append(made.flops)
                if i + 1 < len(self.steps):
                    example = cost_lib.goes_on(
                        step, example, made.outputs, self.specs[i + 1]
                    )
        # Keras takes `x * 2.0`, of a dense x, for sparse.
        output = tree.map_structure(
            lambda t: keras.KerasTensor(t.shape, t.dtype), self._outputs()
        )
        if isinstance(output, (list, tuple)) and len(output) == 1:
            (output,) = output  # as the model returns it
        return output, costs

    def _outputs(self) -> Any:
        """Specs of the outputs.

        Where layers tell shapes themselves, those that come out: Keras takes
        their word for it while it makes a graph, and never again.
        """
        layers = internals.flat_layers(self.model)
        if all(
            internals.is_keras(type(x).compute_output_shape) for x in layers
        ):
            return self.model.output
        with calls_undone(layers):
            try:
                return internals.output_spec(self.model, self.model.input)
            except Exception:  # it fails where sizes are not known
                return self.model.output

    def _check_rows(self) -> None:
        """Refuses outputs that are not one a row, see `check_model_rows`."""
        makers = {v: call for call in self._calls.found for v in call.outputs}
        names = [
            f"'{makers[v].operation.name}'" if v in makers else "no call"
            for v in tree.flatten(self._calls.outputs)
        ]
        with calls_undone(internals.flat_layers(self.model)):
            check_model_rows(self.model, [v.spec for v in makers], names)

    def _estimated(
        self, i: int, cost: Any, example: Any, known: dict[Any, Any]
    ) -> cost_lib.Estimate:
        """What a step costs, and makes of one example."""
        step = self.steps[i]
        if cost is None:
            return cost_lib.estimated(step, step.taken(example), known)
        given = step.taken(self.specs[i])
        if callable(cost):
            args, _ = step.arguments(given)
            given = args[0] if len(args) == 1 else args
        value = cost_lib.resolve_cost(step.layer, cost, given)
        return cost_lib.Estimate(value, None)

    def placed_steps(self, spec: Any) -> tuple[list[PlacedCall], Any]:
        """What comes into each step, and goes out of the last one.

        `spec` is of the model's inputs; where they say no size, it may.
        """
        live: Any = tree.flatten(spec)
        placed = []
        known: dict[Any, Any] = {}
        with calls_undone(internals.flat_layers(self.model)):
            for step in self.steps:
                given = step.taken(live)
                key = cost_lib.key_of(step, given)
                placed.append(PlacedCall(step, tuple(live), key))
                if key not in known:
                    known[key] = step.run(given, training=False)
                outputs = step.specs_behind(live, known[key])
                live = tree.flatten(outputs)
        return placed, outputs

    def arranged(self, x: Any) -> Any:
        """Data in the structure of the model's inputs.

        As a functional model, it takes a dict by the names of inputs, and
        lists for tuples.

        Raises:
            ValueError: If there are other inputs.
        """
        names = [tensor.name for tensor in self.model.inputs]
        spec, flat = self.input_spec, tree.flatten(x)
        if isinstance(x, dict) and isinstance(spec, dict):
            flat = tree.flatten({k: v for k, v in x.items() if k in spec})
        elif isinstance(x, dict) and set(names) <= set(x):
            flat = [x[name] for name in names]
        if len(flat) != len(names):
            raise ValueError(
                f"`x` must have the inputs of model '{self.model.name}', "
                f"{names}. Received: {len(tree.flatten(x))} tensors"
                + (f" named {sorted(x)}." if isinstance(x, dict) else ".")
            )
        return tree.pack_sequence_as(spec, flat)

    def why_whole(self, layer: keras.layers.Layer) -> str:
        """Why a layer that calls others is one step; empty for any other."""
        why = self._calls.closed.get(id(layer))
        if why is None:
            return ""
        return (
            f" Layer '{layer.name}' calls others, and stays whole: {why}. "
            "Make the model of the layers that it calls, if you can."
        )

    def starts(self) -> list[int]:
        """The steps with which a cell can begin."""
        count = len(self.steps)
        return [i for i in range(count) if i == 0 or i not in self._together]

    def cut(self, costs: Sequence[float], num_partitions: int) -> list[int]:
        """The number of steps of each cell."""
        return cut_graph(costs, self.live_bytes, self._together, num_partitions)

    def config(self) -> dict[str, Any]:
        """The model as plain values."""
        return {
            "model": keras.saving.serialize_keras_object(self.model),
            "wiring": self._calls.wiring(),
        }

    def check_read(self, wiring: str | None) -> None:
        """Refuses a model that was read as another one than was written.

        Keras tells the calls of a layer apart by their numbers, which are
        others where a model inside is made first, of the layer's own tensors.
        `wiring` is what `config` said, or None if a file is older.

        Raises:
            ValueError: If the calls are others now.
        """
        if wiring not in (None, self._calls.wiring()):
            raise ValueError(
                "A file must be read as the model that was written. Received: "
                f"model '{self.model.name}', whose layers were called on other "
                "tensors, or others were: Keras confuses the calls of a layer "
                "where a model holds a model of its own tensors, and would "
                "load another one without a word. Make the inner model of an "
                "input of its own, `inner = keras.Model(x, layer(x))` with `x "
                "= keras.Input(shape)`. The weights of this file can be read "
                "by `load_weights` of a model that the program makes again."
            )


def _problems(model: keras.Model) -> list[str]:
    """What of the inputs a pipeline cannot take."""
    found = []
    for tensor in model.inputs:
        of = f"the input '{tensor.name}' of model '{model.name}'"
        if not tensor.shape or tensor.shape[0] is not None:
            found.append(
                f"A model must take batches of any size. Received: {of}, of "
                f"shape {tensor.shape}. Make it with `keras.Input(shape)`, "
                "where `shape` is that of a row."
            )
        if tensor.sparse or tensor.ragged:
            found.append(
                f"The inputs of a model must be dense. Received: {of}, which "
                "is sparse or ragged. Turn the data into dense tensors, and "
                "leave `sparse` and `ragged` of `keras.Input` out."
            )
    return found


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
            step = LiveCall(
                call.operation,
                tree.map_structure(_replaced(before), call.args),
                tree.map_structure(_replaced(before), call.kwargs),
                tree.map_structure(_replaced({**before, **made}), gives),
            )
            step.autocast = call.autocast
            found.append(step)
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
