"""Sums that round alike in every run, and wherever a cell ends."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_VARIANT = tf.variant.as_datatype_enum


def add_in_order(definition: Any) -> None:
    """Replaces sums of three and more tensors by sums of two.

    AddN begins with the first tensor whose memory it may write to. That is
    not the same one in every run and at every cut, so neither is the rounding.
    """
    for node in list(definition.node):
        if node.op != "AddN" or node.attr["T"].type == _VARIANT:
            continue
        *others, last = (i for i in node.input if i[0] != "^")
        controls = [i for i in node.input if i[0] == "^"]
        if len(others) < 2:
            continue
        total = others[0]
        for i, other in enumerate(others[1:]):
            partial = definition.node.add(
                op="AddV2",
                name=f"{node.name}/partial_{i}",
                device=node.device,
                input=[total, other],
            )
            partial.attr["T"].CopyFrom(node.attr["T"])
            total = partial.name
        node.op = "AddV2"
        node.attr.pop("N")
        node.ClearField("input")
        node.input.extend([total, last, *controls])
