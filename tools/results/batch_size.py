"""Translation with three sizes of mini-batches, after equally many examples.

A larger mini-batch has more micro-batches of the same size, so that memory does
not grow: M is what makes large batches possible. All runs see each example
equally often, so the larger the batches, the fewer the updates. The paper's
table 5 compares such sizes.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), table 5
"""

import dataclasses

from absl import flags

import params
from tools.flags import define
from tools.report import Table, columns
from tools.results import runs
from tools.results.outcome import Outcome, Picture, Series
from tools.text import translation_scores as scores

FLAGS = runs.new_flags()
runs.define_translation(FLAGS)
define(
    FLAGS,
    epochs=(12, "Times to go through the data."),
)

_NAMES = [f"mt.t_6_8192_16_batch_{size}_small" for size in ("260k", "1m", "4m")]
_COLUMNS = columns(
    "batch_size: positions a batch: , | num_micro_batches: M | "
    "num_steps: steps: , | minutes: minutes: .0f | nll: test NLL: .3f | "
    "bleu: BLEU: .1f | chrf: chrF: .1f"
)


def run(values: flags.FlagValues) -> Outcome:
    """Trains with each size, and scores the translations."""
    experiments = [
        dataclasses.replace(params.get(name), epochs=values.epochs)
        for name in _NAMES
    ]
    runs.prepare_devices(max(e.num_partitions for e in experiments))
    rows, lines = [], []
    for experiment in experiments:
        found = runs.finish(experiment, values)
        made = runs.translated(found, values)
        rows.append(
            {
                "batch_size": experiment.batch_size,
                "num_micro_batches": experiment.num_micro_batches,
                "num_steps": found.num_steps,
                "minutes": found.minutes,
                **found.results,
                **scores.score(made, experiment.data.to_english),
            }
        )
        steps, nll = zip(*found.curves["nll"])
        lines.append(
            Series(
                f"{experiment.batch_size:,} positions a batch, "
                f"M={experiment.num_micro_batches}",
                [values.epochs * step / found.num_steps for step in steps],
                nll,
            )
        )
    what = experiments[0]
    notes = ["Positions: tokens and padding of a mini-batch's targets."]
    if values.steps:
        notes.append("With --steps, the runs see different numbers of pairs.")
    table = Table(
        "batch_size",
        f"{', '.join(what.data.languages or ['102 languages'])} to English, "
        f"{values.epochs} epochs",
        _COLUMNS,
        rows,
        notes,
    )
    picture = Picture(
        "Translation with three sizes of mini-batches",
        "times through the data",
        "test NLL a token (nats)",
        lines,
    )
    return Outcome([table], picture)
