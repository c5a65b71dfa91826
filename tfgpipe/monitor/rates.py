"""How fast a model is trained: examples a second, tokens, FLOPs."""

from __future__ import annotations

import time
import warnings
from typing import Any

import keras

from tfgpipe import internals
from tfgpipe.planning import cost


class Rates:
    """Counts examples and seconds while it runs.

    What the loss tracker counts are the examples. To read it waits for the
    devices, so it is done when counting starts and stops, not in between.

    Args:
        model: A compiled model.

    Attributes:
        seconds: How long it has run, up to the last `stop`.
        examples: How many examples came in that time.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._since: tuple[float, float] | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets what was counted."""
        self.seconds = self.examples = 0.0
        self._is_known = True
        self._since = None

    def start(self) -> None:
        """Counts from now on, without what came since the last `stop`."""
        examples = self._count()
        self._since = time.perf_counter(), examples

    def stop(self) -> None:
        """Adds what came since `start`; nothing if it has been stopped."""
        if self._since is None:
            return
        (start, before), self._since = self._since, None
        examples = self._count() - before
        self._is_known &= examples >= 0  # or someone has reset the metrics
        self.seconds += time.perf_counter() - start
        self.examples += examples

    @property
    def examples_per_second(self) -> float | None:
        """The mean; None if it cannot be told."""
        if not self._is_known or not self.examples:
            return None
        return self.examples / self.seconds

    def _count(self) -> float:
        return float(internals.loss_tracker(self._model).count)


def tokens_of_example(input_spec: Any) -> int | None:
    """How many tokens an example has.

    Args:
        input_spec: Nest of what has a `shape` (batch, ...) and a `dtype`.

    Returns:
        0 if the inputs are no token ids; `None` if examples differ.
    """
    leaves = keras.tree.flatten(input_spec)
    first = next(leaf for leaf in leaves if leaf is not None)
    is_ids = len(first.shape) == 2 and "int" in first.dtype
    return first.shape[1] if is_ids else 0


def flops_of_example(model: Any, input_spec: Any) -> float | None:
    """FLOPs of the forward pass of one example, by `planning.cost`.

    Args:
        model: A `GPipe` that is built.
        input_spec: Nest of `keras.KerasTensor`: those of the data.

    Returns:
        The FLOPs; None, with a warning, if examples differ in size.
    """
    leaves = [x for x in keras.tree.flatten(input_spec) if x is not None]
    if any(None in tuple(leaf.shape[1:]) for leaf in leaves):
        warnings.warn(
            "`PipelineMonitor` leaves out `model_flops_utilisation`, as it "
            "does not know the sizes of all examples. Received: data of "
            f"shapes {[tuple(leaf.shape) for leaf in leaves]}. Pass "
            "`flops_of_example`, the mean FLOPs of a forward pass.",
            stacklevel=2,
        )
        return None
    return cost.layer_flops(model, input_spec)
