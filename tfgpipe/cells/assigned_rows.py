"""Warns of state that micro-batches do not make as their mini-batch would.

After a mini-batch, a number that layers assign is the mean of what the
micro-batches have assigned, weighted by their rows: right for what is linear in
means over rows, as running means are, and wrong for a queue of rows, for what
is counted or added up, for a maximum. Of integers, and of weights, the first
micro-batch's value is taken: right for what does not follow from rows. Metrics
run on, and are added up over replicas: right for sums. The graph of a cell
shows which of these it is; what it does not show to be right is warned of.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfgpipe.cells.row_states import Total
from tfgpipe.cells.rows_seen import RowsSeen
from tfgpipe.cells.sparse import RowDependence
from tfgpipe.cells.values import is_continuous

_CURE = (
    "Count and add up in a `keras.metrics.Metric` of the layer, which runs on "
    "from micro-batch to micro-batch, or pass num_micro_batches=1."
)
_ADDS = {"Add", "AddV2"}
_SAME = {"Cast", "EnsureShape", "Identity", "StopGradient"}


def check_assigned(seen: RowsSeen) -> None:
    """Warns of what the layers of a cell assign to their variables."""
    function, outputs = seen.function, seen.traced.outputs
    left_out = function.chained | {id(v) for v in function.seeds}
    for variable, value in zip(function.state, outputs.state):
        if value is None or id(variable) in left_out:
            continue
        if not seen.depends(value) or _is_mean(seen, value):
            continue
        if is_continuous(value):
            seen.warn(
                value.op,
                f"assigns '{variable.name}' what is not seen to be a mean over "
                "rows. It becomes the mean of what the micro-batches assign, "
                "weighted by their rows, and not what the whole mini-batch "
                "would assign. Assign a mean over rows, divided by their "
                f"number. {_CURE}",
            )
        else:
            _warn_of_first(seen, variable, value)
    for variable, value in zip(function.flat_weights, outputs.weights):
        if value is not None and seen.depends(value):
            _warn_of_first(seen, variable, value)


def _is_mean(seen: RowsSeen, value: tf.Tensor) -> bool:
    """Whether a new value is seen to be linear in means over rows."""
    state = seen.state_of(value)
    is_mean = isinstance(state, Total) and state.is_mean
    return is_mean and is_continuous(value)


def _warn_of_first(seen: RowsSeen, variable: Any, value: tf.Tensor) -> None:
    seen.warn(
        value.op,
        f"assigns '{variable.name}' what follows from rows, or their number. "
        "It becomes what the first micro-batch assigns, and not what the whole "
        f"mini-batch would. {_CURE}",
    )


def check_metrics(seen: RowsSeen) -> None:
    """Warns of metrics that replicas do not add up to, if there are several."""
    function = seen.function
    own = {id(v) for v in function.cell.metric_state}
    if len(function.cell.devices) == 1:
        return
    given = seen.traced.inputs.state
    new = seen.traced.outputs.state
    for variable, old, value in zip(function.state, given, new):
        is_summed = id(variable) in own and variable.aggregation == "sum"
        if value is None or not is_summed or _is_added_to(old, value):
            continue
        seen.warn(
            value.op,
            f"has a metric with '{variable.name}', to which it does not only "
            "add: what each replica has is added up, which is not what the "
            "whole mini-batch would give. Pass the metric to `compile`, or "
            "train without replicas.",
        )


def _is_added_to(old: tf.Tensor, new: tf.Tensor) -> bool:
    """Whether a new value is the old one, and something that is added."""
    depends = RowDependence([(old, True)])
    while new is not old:
        inputs = [t for t in new.op.inputs if depends(t)]
        is_known = new.op.type in _ADDS | _SAME
        if not is_known or len(inputs) != 1:
            return False
        (new,) = inputs
    return True
