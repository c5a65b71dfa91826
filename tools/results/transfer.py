"""Classes that are new, from few examples: fine-tuned, or from scratch.

A model learns eight of the ten classes. Then it learns to tell the other two
apart, from 20 examples of each: with a new classifier on the trained layers,
and beside it, the same model with new weights. Each run draws other examples,
the same for both.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 4
"""

import dataclasses

from absl import flags

import params
from tools.flags import define
from tools.report import Table, columns, progress
from tools.results import runs
from tools.results.outcome import Outcome, Picture, Series

FLAGS = runs.new_flags()
define(
    FLAGS,
    num_runs=(5, "Runs of each kind."),
)

_PRETRAINED = "image.transfer_pretrain"
_KINDS = {
    "fine-tuned": "image.transfer_finetune",
    "from scratch": "image.transfer_scratch",
}
_COLUMNS = columns(
    "kind: weights | num_runs: runs | mean: mean accuracy: .1% | "
    "lowest: lowest: .1% | highest: highest: .1%"
)


def run(values: flags.FlagValues) -> Outcome:
    """Trains the first model, then both kinds, and compares these."""
    before = params.get(_PRETRAINED)
    runs.prepare_devices(before.num_partitions)
    trained = runs.finish(before, values)
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for seed in progress(range(values.num_runs), "runs"):
        for kind, name in _KINDS.items():
            experiment = params.get(name)
            experiment = dataclasses.replace(
                experiment,
                seed=seed,
                data=dataclasses.replace(experiment.data, subset_seed=seed),
            )
            start = trained.folder / "final.keras"
            one = runs.finish(
                experiment,
                values,
                name=f"{name}_seed_{seed}",
                initial_model=start if experiment.starts_from else None,
            )
            found[kind].append(one.results["accuracy"])
    table = Table(
        "transfer",
        "Two new classes from 20 examples of each",
        _COLUMNS,
        [_row(kind, accuracies) for kind, accuracies in found.items()],
        [
            "Before, on the other eight classes: "
            f"{trained.results['accuracy']:.1%}."
        ],
    )
    picture = Picture(
        "Two new classes from 20 examples of each, several runs",
        "",
        "test accuracy",
        dots=[Series(kind, [], ys) for kind, ys in found.items()],
        is_percent=True,
    )
    return Outcome([table], picture)


def _row(kind: str, accuracies: list[float]) -> dict[str, object]:
    return {
        "kind": kind,
        "num_runs": len(accuracies),
        "mean": sum(accuracies) / len(accuracies),
        "lowest": min(accuracies),
        "highest": max(accuracies),
        "accuracies": accuracies,
    }
