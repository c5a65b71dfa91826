"""Each kind of model trained by some schedule, and each schedule with some."""

import pytest
from kinds import KINDS
from matrix import WHOLE, arguments
from test_transparency import optimizers, train

import tfgpipe
from tfgpipe.schedules import CHUNKS


def dealt(schedules, every):
    """Each kind with one of the schedules; all but one of so many are slow.

    A loss of the mini-batch needs one that goes forward first.
    """
    for i, kind in enumerate(sorted(KINDS)):
        schedule = schedules[i % len(schedules)]
        marks = [] if i % every == 0 else pytest.mark.slow
        yield pytest.param(
            kind, "gpipe" if kind in WHOLE else schedule, marks=marks
        )


def values(kind, schedule, m=3, remat="except_last", **changed):
    """History and weights of a pipeline after a step."""
    k = 2 if CHUNKS[schedule] == 1 else 4
    model, history, _ = train(
        KINDS[kind],
        lambda layers: tfgpipe.GPipe(
            layers, **arguments(k, m, schedule, remat), **changed
        ),
        optimizers("momentum"),
        epochs=1,
    )
    return [*history.values(), *(w.numpy() for w in model.weights)]
