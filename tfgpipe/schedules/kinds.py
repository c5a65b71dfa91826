"""The kinds of operations: one table, which all others read.

    forward(k, m)          after forward(k - 1, m)
    recompute(k, m)        after forward(k, m)
    backward(k, m)         after forward(k, m), recompute(k, m) if there is one,
                           and backward(k + 1, m) or input_gradient(k + 1, m)
    input_gradient(k, m)   the same as backward(k, m)
    weight_gradient(k, m)  after input_gradient(k, m)

A recomputation does not need the gradient: it fills the time in which a device
waits for it. A new kind is a row here, and a method of `TaskValues`, in
`run/pipeline.py`, that makes it ready to run.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from typing import NamedTuple


class Need(NamedTuple):
    """Operations on the same micro-batch whose results a kind takes.

    Attributes:
        offset: Of their cell: -1 is the cell before, 0 the same one.
        kinds: Which ones, as far as a schedule has them.
    """

    offset: int
    kinds: tuple[str, ...]


class Kind(NamedTuple):
    """What there is to know of a kind.

    Attributes:
        letter: In texts.
        needs: What it waits for.
        units: How long it takes among equal cells, a forward pass as the unit.
        lane: Which of a device's lanes it takes: those run side by side.
        needs_loss: Whether it takes a gradient, so that none runs before the
            loss is known.
        sends: What another cell takes of it: "outputs", "gradients" or "".
        begins: Whether a cell holds something of the micro-batch from it on.
        ends: Whether it ends the work on it, and frees its activations.
        is_optional: Whether a micro-batch may do without it.
    """

    letter: str
    needs: tuple[Need, ...]
    units: float = 1
    lane: str = "compute"
    needs_loss: bool = False
    sends: str = ""
    begins: bool = False
    ends: bool = False
    is_optional: bool = False


_GRADIENTS = ("backward", "input_gradient")

_FOR_GRADIENTS = Need(0, ("forward", "recompute")), Need(1, _GRADIENTS)

KINDS = {
    "forward": Kind(
        "F", (Need(-1, ("forward",)),), sends="outputs", begins=True
    ),
    "recompute": Kind("R", (Need(0, ("forward",)),), is_optional=True),
    "backward": Kind(
        "B",
        _FOR_GRADIENTS,
        units=2,
        needs_loss=True,
        sends="gradients",
        ends=True,
    ),
    "input_gradient": Kind(
        "I", _FOR_GRADIENTS, needs_loss=True, sends="gradients"
    ),
    "weight_gradient": Kind(
        "W", (Need(0, ("input_gradient",)),), needs_loss=True, ends=True
    ),
}

# A backward pass is whole, or has these.
HALVES = ("input_gradient", "weight_gradient")
