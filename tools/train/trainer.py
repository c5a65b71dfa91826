"""Trains an experiment: model, data, checkpoints, evaluation."""

import contextlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import keras

import tfgpipe
from models import transfer
from params import Experiment
from params.source import Source
from tfgpipe.callbacks import Checkpoint, StopOnNonFinite
from tfgpipe.checkpoints import Restored
from tfgpipe.commands.command_line import doing
from tfgpipe.exactness import Report
from tfgpipe.files import FolderLock, clear_unfinished, write_text
from tfgpipe.model.saving import spec_config

_MOST_SKIPPED = 10  # mini-batches in a row


def make_ready(
    model: tfgpipe.GPipe, experiment: Experiment, source: Source, num_steps: int
) -> None:
    """Builds and compiles the model of an experiment."""
    model.build_from_config(spec_config(source.input_spec))
    model.compile(
        optimizer=experiment.optimizer.make(num_steps),
        **experiment.task.compile_arguments(),
    )


class Trainer:
    """One run of an experiment, that can be interrupted and resumed.

    Args:
        experiment: What to train.
        num_steps: Optimizer updates; `None` for all of the epochs.
        train_dir: Folder for checkpoints and the trained model; `None` keeps
            nothing. It is made if need be. A run of the same experiment that
            was interrupted there is resumed, with the same or another number
            of partitions.
        initial_model: The trained model that an experiment starts from, a
            .keras file; for those with `starts_from` alone.
        strategy: Replicas and their devices; `None` for one pipeline on the
            first devices.
        shares_folder: Whether all hosts have `train_dir` in common; see
            `tfgpipe.callbacks.Checkpoint`.
        saves_on_signal: Whether SIGTERM, SIGHUP and Ctrl-C save a checkpoint
            before they end the process; see there.

    Attributes:
        experiment: As given.
        source: Its data.
        model: The `tfgpipe.GPipe`.
        num_steps: Optimizer updates in the whole run.
        first_step: Mini-batches that an interrupted run had seen already.
        failure: Why `fit` ended early, in words: ten mini-batches in a row
            were not finite. None if it did not.

    Raises:
        ValueError: If `train_dir` holds another run, or another process writes
            to it, or the experiment cannot be run.
    """

    def __init__(
        self,
        experiment: Experiment,
        num_steps: int | None = None,
        train_dir: pathlib.Path | None = None,
        initial_model: pathlib.Path | None = None,
        strategy: tfgpipe.PipelineStrategy | None = None,
        shares_folder: bool = True,
        saves_on_signal: bool = False,
    ) -> None:
        self.experiment = experiment
        with doing(f"reading {experiment.data.name}"):
            self.source = experiment.data.source()
        self._per_epoch = self.source.steps_per_epoch(experiment.batch_size)
        self.num_steps = num_steps or self._per_epoch * experiment.epochs
        self._folder = train_dir
        self._initial_model = initial_model
        self._strategy = strategy
        self._shares_folder = shares_folder
        self._saves_on_signal = saves_on_signal
        with doing(f"building {experiment.name}"):
            self.model = self._new_model()  # checks the arguments
        self.first_step = 0
        self.failure: str | None = None
        if train_dir is not None:
            self._claim_folder(train_dir)
            with doing("reading the last checkpoint"):
                folder = train_dir / "checkpoints"
                restored = tfgpipe.restore(self.model, folder)
            self.first_step = 0 if restored is None else restored.step

    def _claim_folder(self, folder: pathlib.Path) -> None:
        """Checks that no other run uses the folder; notes this one there."""
        run = self.experiment.settings()
        run |= {"num_steps": self.num_steps, "num_partitions": None}
        if self._strategy and self._strategy.num_replicas > 1:
            run["num_replicas"] = self._strategy.num_replicas
        claim_folder(folder, run)

    def _scope(self) -> Any:
        """Where pipelines are made. A context manager."""
        if self._strategy is None:
            return contextlib.nullcontext()
        return self._strategy.scope()

    def _new_model(self) -> tfgpipe.GPipe:
        experiment = self.experiment
        keras.utils.set_random_seed(experiment.seed)
        layers = self._layers()
        with self._scope():
            model = tfgpipe.GPipe(
                layers,
                num_partitions=experiment.num_partitions,
                num_micro_batches=experiment.num_micro_batches,
                layers_per_cell=experiment.layers_per_cell,
                schedule=experiment.schedule,
                remat=experiment.remat_argument,
                remat_groups=experiment.remat_groups,
                head_parts=experiment.head_parts,
                weights_on=experiment.weights_on,
                skip_nonfinite=True,
            )
        make_ready(model, experiment, self.source, self.num_steps)
        return model

    def _layers(self) -> list[keras.layers.Layer]:
        """New layers, or trained ones with a new last one."""
        new, before = self.experiment.model.layers(), self._initial_model
        starts_from = self.experiment.starts_from
        if (before is None) != (starts_from is None):
            raise ValueError(
                "`initial_model` must be given for an experiment that starts "
                f"from another, and for no other. Expected: {starts_from}. "
                f"Received: initial_model={before and str(before)!r}. Train "
                "the one it starts from with a --train_dir, and give the "
                "final.keras from there."
            )
        if before is None:
            return new
        if not before.is_file():
            raise FileNotFoundError(
                "`initial_model` must be a file. Received: "
                f"initial_model={str(before)!r}, which does not exist. Train "
                f"{starts_from} with a --train_dir first."
            )
        trained = tfgpipe.load_model(
            str(before), num_partitions=1, compile=False
        )
        return transfer.replace_classifier(trained.layers, new[-1])

    def fit(
        self,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        verbose: int | str = "auto",
        checkpoint_every: int | None = None,
    ) -> None:
        """Trains, with checkpoints of the last steps.

        See `failure` for whether it ended early.
        """
        stop = StopOnNonFinite(_MOST_SKIPPED, say=None)
        skips = [stop] if getattr(self.model, "skip_nonfinite", False) else []
        for start, end in _parts(
            self.first_step, self.num_steps, self._per_epoch
        ):
            saving = self._checkpoints(start, checkpoint_every)
            with doing("training"):
                self.model.fit(
                    self.source.train(
                        self.experiment.batch_size,
                        seed=self.experiment.seed,
                        first_step=start,
                        num_steps=end,
                    ),
                    initial_epoch=start // self._per_epoch,
                    epochs=-(-end // self._per_epoch),
                    steps_per_epoch=min(self._per_epoch, end - start),
                    callbacks=[*callbacks, *skips, *saving],
                    verbose=verbose,
                    shuffle=False,  # the data are
                )
            self.failure = stop.reason
            if self.failure is not None:
                return

    def _checkpoints(
        self, start: int, every: int | None
    ) -> list[keras.callbacks.Callback]:
        """What saves, in a `fit` that begins after so many steps."""
        if self._folder is None:
            return []
        folder = self._folder / "checkpoints"
        epoch, batch = divmod(start, self._per_epoch)
        resumed = Restored(str(folder), start, epoch, batch)
        return [
            Checkpoint(
                folder,
                every,
                resumed=resumed,
                shared=self._shares_folder,
                on_signal=self._saves_on_signal,
            )
        ]

    def check(self) -> Report:
        """Compares a step on the next mini-batch, see `tfgpipe.check`.

        Nothing is trained.
        """
        data = self.source.train(
            self.experiment.batch_size,
            seed=self.experiment.seed,
            first_step=self.first_step,
            num_steps=self.first_step + 1,
        )
        with doing("comparing a step with plain Keras"):
            return tfgpipe.check(self.model, *next(iter(data)))

    def evaluate(self) -> dict[str, float]:
        """What the test examples give, by name; see the experiment's task."""
        with doing("testing"):
            return evaluated(self.model, self.experiment, self.source)

    def export(self) -> pathlib.Path | None:
        """Saves the model as final.keras in `train_dir`; returns its path."""
        if self._folder is None:
            return None
        path = self._folder / "final.keras"
        with doing("saving the trained model"):
            self.model.save(path)
        return path


def evaluated(
    model: keras.Model, experiment: Experiment, source: Source
) -> dict[str, float]:
    """Returns what the test examples give, by name."""
    data = source.evaluation(
        experiment.evaluation_batch_size or experiment.batch_size
    )
    logs = model.evaluate(data, verbose=0, return_dict=True)
    return experiment.task.results(logs, source)


def _parts(start: int, end: int, per_epoch: int) -> list[tuple[int, int]]:
    """The rest of an epoch, whole epochs, and the beginning of one.

    Each part is the steps from its first number to before its second.
    """
    first_whole = min(end, -(-start // per_epoch) * per_epoch)
    last_whole = max(first_whole, end - end % per_epoch)
    parts = [(start, first_whole), (first_whole, last_whole), (last_whole, end)]
    return [(first, last) for first, last in parts if first < last]


_held: dict[pathlib.Path, FolderLock] = {}  # as long as this process lives


def claim_folder(folder: pathlib.Path, run: dict[str, Any]) -> None:
    """Takes a folder for a run, and notes the run there."""
    path = folder / "experiment.json"
    new = json.loads(json.dumps(run))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        where = folder.resolve()
        if where not in _held:
            _held[where] = FolderLock(folder, "train_dir")
            clear_unfinished(folder)
        old = json.loads(path.read_text("utf-8")) if path.exists() else new
        before, now = _flat(old), _flat(new)
        differ = [
            f"  {name}: {before.get(name)} there, {now.get(name)} here"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if differ:
            raise ValueError(
                "`train_dir` must be new, or hold this same run. Received: "
                f"train_dir={str(folder)!r}, which holds a run with other "
                "parameters:\n" + "\n".join(differ) + "\nGive another folder, "
                "or the same flags as then; only --num_partitions may change."
            )
        write_text(path, json.dumps(new, indent=2))
    except OSError as error:
        raise ValueError(
            "`train_dir` must be a folder that can be written to. "
            f"Received: train_dir={str(folder)!r}, which gives: {error}."
        ) from error


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Parameters by the names that --set has for them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
