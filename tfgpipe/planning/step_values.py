"""What a step by itself is computed from, and what it keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.cells import Boundary


class Place(NamedTuple):
    """What the backward pass has to do for a step, by where it is.

    Attributes:
        differentiates: Whether there are weights in it, or before it.
        needs_dx: Whether there are weights before it.
    """

    differentiates: bool
    needs_dx: bool


class StepValues(NamedTuple):
    """What a step is computed from.

    Attributes:
        inputs: What crosses into it.
        weights: Values of the trainable variables.
        state: Values of all other variables.
        labels: What the head takes, or None.
    """

    inputs: Boundary
    weights: list[tf.Tensor]
    state: list[tf.Tensor]
    labels: Any = None


class KeptBytes(NamedTuple):
    """What the backward pass keeps: of inputs, of outputs, and of all else."""

    inputs: int
    outputs: int
    others: int
