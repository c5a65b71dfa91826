"""What it costs to skip what is not finite, and to save in the background."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import keras

import tfgpipe
from tfgpipe.checkpoints import Folder, Position, Writer
from tools.bench.models import BenchModel, train_step
from tools.report import (
    Column,
    alternated,
    spread,
    spread_columns,
    spread_values,
)

COLUMNS = [
    Column("model", "model"),
    Column("what", "what"),
    *spread_columns("without_ms", "without ms", ".1f"),
    *spread_columns("with_ms", "with ms", ".1f"),
    *spread_columns("ratio", "ratio", ".3f"),
]
_STEPS = 10  # from one checkpoint to the next


def rows(name: str, what: BenchModel, rounds: int) -> Iterator[dict[str, Any]]:
    """Two cells and eight micro-batches, trained by Adam.

    Args:
        name: Of the model.
        what: The model.
        rounds: Turns of each; medians and quartiles are returned.
    """
    plain, skipping = _step(what, False), _step(what, True)
    yield _row(name, "skip_nonfinite", plain[1], skipping[1], rounds)
    with tempfile.TemporaryDirectory() as folder:
        saving = Folder(os.path.join(folder, "checkpoints"))
        saving.take()
        writer = Writer(saving, 2, "min", None, {})
        count = itertools.count()

        def without() -> float:
            return sum(plain[1]() for _ in range(_STEPS)) / _STEPS

        def with_one() -> float:
            writer.start(plain[0], Position(next(count), 0, 0), None)
            found = without()
            writer.wait()  # or the next turn, without one, would pay for it
            return found

        label = f"a checkpoint in {_STEPS} steps"
        yield _row(name, label, without, with_one, rounds)


def _step(what: BenchModel, skip: bool) -> tuple[keras.Model, Any]:
    model = tfgpipe.GPipe(
        what.layers(),
        num_partitions=2,
        num_micro_batches=8,
        devices=["CPU:0", "CPU:1"],
        skip_nonfinite=skip,
    )
    model.build((None, *what.x_shape))
    model.compile("adam", what.loss, jit_compile=False)
    return model, train_step(model, *what.data(what.batch_size))


def _row(
    name: str, what: str, before: Any, after: Any, rounds: int
) -> dict[str, Any]:
    before(), after()  # trace
    times = alternated([before, after], rounds, f"{name}, {what}")
    ratios = [b / a for a, b in zip(*times)]
    return {
        "model": name,
        "what": what,
        **spread_values("without_ms", spread(times[0]).times(1000)),
        **spread_values("with_ms", spread(times[1]).times(1000)),
        **spread_values("ratio", spread(ratios)),
    }
