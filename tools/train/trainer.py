"""Trains an experiment: model, data, checkpoints, evaluation."""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

import keras

import tfgpipe
from models import transfer
from params import Experiment
from tfgpipe.callbacks import StopOnNonFinite
from tfgpipe.saving import spec_config
from tools.train import run_record

_MOST_SKIPPED = 10  # mini-batches in a row


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
        skip_nonfinite: Whether mini-batches with a loss or a gradient that is
            not finite are skipped, see `tfgpipe.GPipe`. Ten in a row end the
            run.
        may_grow: Whether `train_dir` may hold this run with fewer steps, which
            goes on then, with the learning rates of the longer run.

    Attributes:
        experiment: As given.
        source: Its data.
        model: The `tfgpipe.GPipe`.
        num_steps: Optimizer updates in the whole run.
        first_step: Mini-batches that an interrupted run had seen already.
        failure: Why `fit` ended early, in words; None if it did not.
        earlier_num_steps: What `num_steps` was before the run grew, in order.

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
        skip_nonfinite: bool = True,
        may_grow: bool = False,
    ) -> None:
        self.experiment = experiment
        self.source = experiment.data.source()
        self._per_epoch = self.source.steps_per_epoch(experiment.batch_size)
        self.num_steps = num_steps or self._per_epoch * experiment.epochs
        self._folder = train_dir
        self._initial_model = initial_model
        self._strategy = strategy
        self._skips = skip_nonfinite
        model = self._new_model()  # checks the arguments
        self.earlier_num_steps: list[int] = []
        if train_dir is not None:
            self.earlier_num_steps = self._claim_folder(train_dir, may_grow)
        self.model = self._restore() or model
        updates = int(self.model.optimizer.iterations)
        self.first_step = updates + self.model.num_skipped
        self.failure: str | None = None

    def _claim_folder(self, folder: pathlib.Path, may_grow: bool) -> list[int]:
        """Checks that no other run uses the folder; notes this one there."""
        run = self.experiment.settings()
        run |= {"num_steps": self.num_steps, "num_partitions": None}
        if self._strategy and self._strategy.num_replicas > 1:
            run["num_replicas"] = self._strategy.num_replicas
        return run_record.claim(folder, run, may_grow)

    def _restore(self) -> tfgpipe.GPipe | None:
        if self._folder is None or not self._checkpoint.exists():
            return None
        with self._scope():
            model = tfgpipe.load_model(
                str(self._checkpoint),
                num_partitions=self.experiment.num_partitions,
                skip_nonfinite=self._skips,
            )
        # That of the checkpoint may be of a shorter run.
        rate = self.experiment.optimizer.rate(self.num_steps)
        model.optimizer.learning_rate = rate
        return model

    def _scope(self) -> Any:
        """Where pipelines are made. A context manager."""
        if self._strategy is None:
            return contextlib.nullcontext()
        return self._strategy.scope()

    @property
    def _checkpoint(self) -> pathlib.Path:
        return self._folder / "checkpoint.keras"

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
                skip_nonfinite=self._skips,
            )
        model.build_from_config(spec_config(self.source.input_spec))
        model.compile(
            optimizer=experiment.optimizer.make(self.num_steps),
            **experiment.task.compile_arguments(),
        )
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
        until: int | None = None,
        verbose: int | str = "auto",
        checkpoint_every: int | None = None,
    ) -> None:
        """Trains, with a checkpoint after every epoch.

        See `failure` for whether it ended early.

        Args:
            callbacks: More of Keras's callbacks.
            until: The step after which to stop; `None` for `num_steps`.
            verbose: As in `keras.Model.fit`.
            checkpoint_every: Steps after which there is a checkpoint, too,
                for long epochs; `None` for none.
        """
        callbacks = list(callbacks)
        stop = StopOnNonFinite(_MOST_SKIPPED, say=None)
        if self._skips:
            callbacks.append(stop)
        if self._folder is not None:
            callbacks.append(_Checkpoint(self._checkpoint, checkpoint_every))
        until = until or self.num_steps
        for start, end in _parts(self.first_step, until, self._per_epoch):
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
                callbacks=callbacks,
                verbose=verbose,
                shuffle=False,  # the data are
            )
            self.failure = stop.reason
            if self.failure is not None:
                return

    def evaluate(self) -> dict[str, float]:
        """What the test examples give, by name; see the experiment's task."""
        experiment = self.experiment
        data = self.source.evaluation(
            experiment.evaluation_batch_size or experiment.batch_size
        )
        logs = self.model.evaluate(data, verbose=0, return_dict=True)
        return experiment.task.results(logs, self.source)

    def export(self) -> pathlib.Path | None:
        """Saves the model as final.keras in `train_dir`; returns its path."""
        if self._folder is None:
            return None
        path = self._folder / "final.keras"
        self.model.save(path)
        return path


def _parts(start: int, end: int, per_epoch: int) -> list[tuple[int, int]]:
    """The rest of an epoch, whole epochs, and the beginning of one.

    Each part is the steps from its first number to before its second.
    """
    first_whole = min(end, -(-start // per_epoch) * per_epoch)
    last_whole = max(first_whole, end - end % per_epoch)
    parts = [(start, first_whole), (first_whole, last_whole), (last_whole, end)]
    return [(first, last) for first, last in parts if first < last]


class _Checkpoint(keras.callbacks.Callback):
    """Saves the model now and then; the file is always a whole one."""

    def __init__(self, path: pathlib.Path, every: int | None) -> None:
        super().__init__()
        self._path = path
        self._every = every

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._every is None:  # do not wait for the device
            return
        if int(self.model.optimizer.iterations) % self._every == 0:
            self.model.save(self._path)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.model.save(self._path)
