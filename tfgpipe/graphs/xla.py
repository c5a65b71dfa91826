"""Says what of a model's graph XLA cannot compile, before anything runs.

XLA compiles a function when it is first called. In the middle of a step that is
too late: some devices have worked already. TensorFlow's registry of kernels
tells which operations XLA does not know: strings, lookups, Python functions.
The graph is also translated for XLA, which neither compiles nor runs anything:
so XLA tells which sizes follow from values.

Known limits: a size that the trace does not know is taken for `_SIZE`. A graph
that uses tables or other resources is not translated.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs.functions import tensors
from tfgpipe.graphs.parts import Part

# Stands for a number of rows, or of positions, that is not known.
_SIZE = 4

# How XLA names the operation that it cannot compile.
_NODE = re.compile(r"node (?:`|\{\{node )([\w./>-]+)")


class NotCompilable(ValueError):
    """Says that XLA cannot compile a model, and names the cause."""

    def __init__(self, layer: str, cause: str):
        super().__init__(
            "`jit_compile` must be False for a model that XLA cannot compile. "
            f"Received: {layer}: {cause}. Leave `jit_compile` out, or pass "
            "False to `compile`."
        )
        self.layer, self.cause = layer, cause


def check_compilable(parts: Sequence[Part], keys: Sequence[Hashable]) -> None:
    """Refuses a model that XLA cannot compile.

    Of parts that have equal `keys`, the first tells of all.

    Raises:
        NotCompilable: With the layer, the operation, and the cause.
    """
    firsts: dict[Hashable, Part] = {}
    for part, key in zip(parts, keys):
        firsts.setdefault(key, part)
    unlike = [*firsts.values()]
    for part in unlike:
        for op in part.whole.in_order(part.forward | part.backward):
            if op.type != "Placeholder" and not internals.has_xla_kernel(
                op.type
            ):
                cause = f"it runs {op.type}, for which XLA has no kernel"
                raise NotCompilable(_layer(part, op.name), cause)
    # A size that is not known may have to fit another one.
    taken = [
        t
        for part in unlike
        for t in (*part.forward_inputs, *part.gradient_inputs)
    ]
    knows_sizes = all(t.shape.is_fully_defined() for t in taken)
    refusal = _refusal(unlike if knows_sizes else parts)
    if refusal is not None:
        name = next(iter(_NODE.findall(refusal)), "")
        # The first sentence of XLA's words.
        text = refusal.split("\n")[0]
        text = text.removeprefix("Failed getting HLO text: '")
        text = re.sub(r"\{\{node ([^}]*)\}\}", r"\1", text)
        raise NotCompilable(_layer(parts[0], name), text.rstrip("'. "))


def _refusal(parts: Sequence[Part]) -> str | None:
    """Returns XLA's words if it cannot translate some parts of a graph."""
    whole = parts[0].whole
    names = set[str]().union(*(p.forward | p.backward for p in parts))
    operations = [
        op for op in whole.in_order(names) if op.type != "Placeholder"
    ]
    names = {op.name for op in operations}
    inputs = {
        t.name: t
        for op in operations
        for t in op.inputs
        if t.op.name not in names
    }
    if any(
        t.shape.rank is None or t.dtype == tf.resource for t in inputs.values()
    ):
        return None  # XLA translates functions of tensors of a known rank
    definition = whole.definition_of(names)
    results = {
        t.name: None
        for part in parts
        for t in (
            *part.forward_outputs,
            *part.gradient_outputs,
            *tensors(part.dw),
        )
        if t.op.name in names
    }

    def function(*values: tf.Tensor) -> list[tf.Tensor]:
        known = dict(zip(inputs, values))
        return internals.import_definition(definition, known, [*results])

    specs = [
        tf.TensorSpec([n or _SIZE for n in t.shape.as_list()], t.dtype)
        for t in inputs.values()
    ]
    with internals.outside_functions():
        return internals.xla_refusal(function, specs)


def _layer(part: Part, name: str) -> str:
    """Names the layer that runs an operation, or whose gradient does."""
    place = part.traced.places.get(name)
    if place is None:
        return "the model"
    return str(part.traced.section_of(place).words)
