"""Functional models of the plain data of a case."""

from __future__ import annotations

from typing import Any

import keras
import layer_kinds
from case import Case
from data_sources import SHAPES


def model(case: Case, cls: type[keras.Model] = keras.Model) -> Any:
    """A functional model of a class: each layer called on what it takes."""
    shape = SHAPES.get(case.inputs, (4,))
    if case.length is not None:
        shape = (None, *shape[1:])
    shapes = [shape] * (1 + (case.inputs in ("pair", "names")))
    inputs = [
        keras.Input(shape, dtype=case.dtype, name=f"x{i}")
        for i, shape in enumerate(shapes)
    ]
    tensors: dict[str, Any] = {f"x{i}": x for i, x in enumerate(inputs)}
    made: dict[str, Any] = {}
    for spec in case.layers:
        taken = [tensors[name] for name in spec.takes]
        if spec.kind == "model":
            ends = (tensors[spec.options[end]] for end in ("first", "last"))
            made[spec.name] = keras.Model(*ends, name=spec.name)
            layer = made[spec.name]
        else:
            layer = layer_kinds.make_one(spec, made)
        tensors[spec.name] = layer(taken if len(taken) > 1 else taken[0])
    for name in case.frozen:
        made[name].trainable = False
    outputs = [tensors[name] for name in case.outputs or ()]
    return cls(
        inputs if len(inputs) > 1 else inputs[0],
        outputs if len(outputs) > 1 else outputs[0],
        name="graph",
    )
