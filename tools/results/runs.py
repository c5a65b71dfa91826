"""Training runs of the table of results: each is done once, and kept.

A run has a folder of its own. One that was interrupted is resumed, and of one
that is finished the numbers are read again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
from absl import flags

from params import Experiment
from tfgpipe.commands import command_line
from tfgpipe.devices import local
from tfgpipe.files import write_text
from tools.flags import FIGURE, define
from tools.report import define_format
from tools.text import translation_scores as scores
from tools.text.translation_scores import Translated
from tools.text.translator import Translator, define_search
from tools.train import trained_run
from tools.train.trainer import Trainer

_FINISHED = "results.json"
_TRANSLATED = "translations.json"
_TIME = "time.json"
_NUM_CHECKPOINTS = 40  # at least


class Finished(NamedTuple):
    """What a training run gave.

    Attributes:
        experiment: What was trained.
        folder: Where the model is.
        num_steps: Updates.
        num_params: Scalars in all weights.
        minutes: What training took, on the machine that the table names.
        results: Of the test at the end, see `params.task.Task.results`.
    """

    experiment: Experiment
    folder: pathlib.Path
    num_steps: int
    num_params: int
    minutes: float
    results: dict[str, float]

    def row(self, model: str) -> dict[str, Any]:
        """What a table says of it, where it has such a name."""
        return {
            "model": model,
            "num_params": self.num_params,
            "num_steps": self.num_steps,
            "minutes": self.minutes,
            **self.results,
        }


def new_flags() -> flags.FlagValues:
    """The flags that every row of the results has."""
    values = command_line.new_flags()
    define_format(values)
    define(
        values,
        runs_dir=(
            "runs",
            "Folder for the training runs. Finished ones are not done again.",
        ),
        steps=(
            int,
            "Try it: mini-batches of each run, instead of all. These runs have "
            "folders of their own.",
        ),
        figure=FIGURE,
    )
    return values


def define_translation(values: flags.FlagValues) -> None:
    """Defines how test pairs are translated."""
    define_search(values)
    define(
        values,
        max_pairs=(
            int,
            "Most test pairs of a language to translate. Default: all.",
        ),
    )


def prepare_devices(num_partitions: int) -> None:
    """Splits the CPU into enough devices, where there is no accelerator."""
    if num_partitions > 1 and not local.has_accelerator():
        local.split_cpu(num_partitions)


def finish(
    experiment: Experiment,
    values: flags.FlagValues,
    *,
    name: str | None = None,
    maker: type[Trainer] = Trainer,
) -> Finished:
    """Trains to the end, from wherever an earlier call has stopped."""
    folder = pathlib.Path(values.runs_dir) / (name or experiment.name)
    if values.steps:
        folder = folder.with_name(f"{folder.name}_{values.steps}_steps")
    run = json.loads(json.dumps(experiment.settings()))  # as it is read again
    kept = _read(folder / _FINISHED)
    if kept is None or kept["run"] != run:
        # No name for the trainer: its memory is to be freed at the end.
        found = _train(maker(experiment, values.steps, folder), folder)
        kept = {"run": run, **found}
        _write(folder / _FINISHED, kept)
    return Finished(
        experiment,
        folder,
        kept["num_steps"],
        kept["num_params"],
        kept["minutes"],
        kept["results"],
    )


def _train(trainer: Trainer, folder: pathlib.Path) -> dict[str, Any]:
    """Trains, tests and exports; what is printed goes to the standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        print(f"\n{folder}: {trainer.num_steps} steps", flush=True)
        with _adding_time(folder / _TIME):
            trainer.fit(
                verbose=1 if sys.stderr.isatty() else 2,
                checkpoint_every=max(1, trainer.num_steps // _NUM_CHECKPOINTS),
            )
        results = trainer.evaluate()
        trainer.export()
    found = {
        "num_steps": trainer.num_steps,
        "num_params": trainer.model.count_params(),
        "minutes": _read(folder / _TIME)["minutes"],
        "results": results,
    }
    del trainer
    _forget_models()
    return found


@contextlib.contextmanager
def _adding_time(path: pathlib.Path) -> Iterator[None]:
    """Adds the time inside to that of earlier parts of a run."""
    before = (_read(path) or {"minutes": 0.0})["minutes"]
    start = time.monotonic()
    try:
        yield
    finally:
        _write(path, {"minutes": before + (time.monotonic() - start) / 60})


def _forget_models() -> None:
    """Frees the memory of models that nobody uses any more."""
    keras.backend.clear_session()
    gc.collect()


def translated(run: Finished, values: flags.FlagValues) -> list[Translated]:
    """The test pairs and their translations, which are kept too."""
    settings = {
        "beam_size": values.beam_size,
        "length_penalty": values.length_penalty,
        "max_pairs": values.max_pairs,
    }
    kept = _read(run.folder / _TRANSLATED)
    if kept is None or kept["settings"] != settings:
        print(f"\n{run.folder}: test pairs", file=sys.stderr, flush=True)
        loaded = trained_run.load(str(run.folder))
        translator = Translator(loaded, values.beam_size, values.length_penalty)
        found = scores.translate_test(
            loaded.source,
            translator,
            run.experiment.data.to_english,
            values.max_pairs,
        )
        kept = {"settings": settings, "translated": found}
        _write(run.folder / _TRANSLATED, kept)
        del loaded, translator
        _forget_models()
    return [Translated(*one) for one in kept["translated"]]


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _write(path: pathlib.Path, what: dict[str, Any]) -> None:
    """The file is always a whole one."""
    write_text(path, json.dumps(what, indent=1, ensure_ascii=False))
