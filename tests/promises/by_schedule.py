"""Each kind of model trained by some schedule, and each schedule with some."""

import pytest
from kinds import KINDS
from matrix import WHOLE, arguments
from test_transparency import optimizers, train
from with_columns import shards_of

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


def values(kind, schedule, m=3, remat="except_last", shards=None, **changed):
    """History and weights of a pipeline after a step.

    `shards` are devices for all layers that have as many columns, or None.
    """
    k = 2 if CHUNKS[schedule] == 1 else 4

    def make(layers):
        if shards:
            changed["shards"] = shards_of(layers, shards, len(shards))
        return tfgpipe.GPipe(
            layers, **arguments(k, m, schedule, remat), **changed
        )

    model, history, _ = train(
        KINDS[kind],
        make,
        optimizers("momentum"),
        epochs=1,
    )
    return [*history.values(), *(w.numpy() for w in model.weights)]
