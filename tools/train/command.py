"""What `python -m tools.train` does, from its flags to its exit code."""

import dataclasses
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import keras
from absl import flags, logging

import params
from params import Experiment
from tfgpipe.callbacks import PipelineMonitor
from tfgpipe.commands.command_line import doing
from tfgpipe.hosts import secret
from tfgpipe.hosts.addresses import Hosts
from tfgpipe.hosts.controller import Cluster
from tfgpipe.model import print_cells
from tfgpipe.monitor import ideal_bubble
from tools.sizes.model_size import predicted
from tools.sizes.table import print_device_sizes, print_experiments
from tools.train import cluster as cluster_lib
from tools.train import comparison, ends, placement
from tools.train.ends import Code
from tools.train.flags import FLAGS, experiment_of
from tools.train.monitor import Monitor
from tools.train.trainer import Trainer

_REFUSED = (ValueError, FileNotFoundError, ImportError)
_SECONDS = 30.0


def program(argv: list[str]) -> int:
    """Runs the command line; an error that nobody has foreseen has a code."""
    try:
        return main(argv)
    except Exception:
        traceback.print_exc()
        return Code.BROKEN


def main(argv: list[str]) -> int:
    """Runs the command line."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        code, what = int(Code.INTERRUPTED), "Stopped"
    except ends.Stopped as end:
        code, what = end.code, "Stopped"
    except SystemExit as end:  # of `tfgpipe.callbacks.Checkpoint`
        code, what = int(end.code or 0), "Saved"
    print(f"\ntools.train: {what}. {_how_to_go_on()}", file=sys.stderr)
    return code


def _main(argv: list[str]) -> int:
    if not FLAGS["verbosity"].present:  # `app.run` shows what TensorFlow notes
        logging.set_verbosity(logging.WARNING)
    if FLAGS.list:
        print_experiments()
        return 0
    try:
        experiment = experiment_of(argv)
        if FLAGS.plan is not None:
            experiment = placement.planned(experiment)
        if FLAGS.dry_run:
            print(experiment, flush=True)
            print_device_sizes(
                experiment,
                placement.of_dry_run(experiment),
                FLAGS.num_replicas,
            )
            return 0
        placement.check_cores(experiment)
        if FLAGS.tpu is not None:
            return _run(experiment, placement.tpu_cores(experiment))
        found = cluster_lib.given(FLAGS.workers)
        num_devices = placement.split_cpu(experiment, found)
        if found is not None and found.here not in (None, found.controller):
            return cluster_lib.serve_once(
                found,
                num_devices,
                FLAGS.connect_timeout,
                secret.read(FLAGS.secret_file),
                not FLAGS.allow_any_host,
            )
        if found is None:
            placement.check_memory(experiment)
        cluster = _connect(experiment, found)
    except _REFUSED as error:
        return _say(error)
    if cluster is None:
        return _run(experiment, None)
    with cluster:
        try:
            code = _run(experiment, cluster.devices, [cluster.progress])
        except SystemExit as end:
            cluster.end(int(end.code or 0))
            raise
        return cluster.end(code)


def _run(
    experiment: Experiment,
    names: list[str] | None,
    watching: Sequence[keras.callbacks.Callback] = (),
) -> int:
    """Trains and tests on devices of these names; returns the exit code."""
    try:
        trainer = Trainer(
            experiment,
            FLAGS.steps,
            _path(FLAGS.train_dir),
            _path(FLAGS.initial_model),
            placement.strategy(experiment, names),
            FLAGS.skip_nonfinite,
            names is None or FLAGS.shared_train_dir,
            saves_on_signal=bool(FLAGS.train_dir),
            may_grow=True,
            skip_outliers=FLAGS.skip_outliers,
        )
        if FLAGS.check:
            report = trainer.check()
            print(report)
            return Code.FINISHED if report.is_exact else Code.DIFFERENT
        snapshot = _snapshot(trainer)
    except _REFUSED as error:
        return _say(error)
    print(experiment)
    callbacks: list[Any] = [*watching, *([snapshot] if snapshot else [])]
    if FLAGS.pipeline_monitor:
        callbacks.append(PipelineMonitor(log_dir=_log_dir()))
    try:
        callbacks.append(
            Monitor(trainer, _log_dir(), FLAGS.evaluate_every, _say_every())
        )
        return _finish(trainer, callbacks, snapshot, names)
    except OSError as error:
        print(f"\ntools.train: {error}\n{_how_to_go_on()}", file=sys.stderr)
        return Code.FILES


def _finish(
    trainer: Trainer,
    callbacks: list[Any],
    snapshot: comparison.Snapshot | None,
    names: list[str] | None,
) -> int:
    """Trains, tests and exports; returns the exit code."""
    experiment = trainer.experiment
    _train(trainer, trainer.num_steps, callbacks)
    if trainer.failure is not None:
        print(f"tools.train: {trainer.failure}", file=sys.stderr)
        return Code.NOT_FINITE
    if trainer.model.num_skipped:
        print(
            f"Skipped {trainer.model.num_skipped} mini-batches that were not "
            f"finite{', or outliers' if FLAGS.skip_outliers else ''}."
        )
    print(experiment.task.summary(trainer.evaluate()))
    if experiment == params.get(experiment.name) and not FLAGS.steps:
        print(f"Expected: {experiment.expected_result}")
    if saved := trainer.export():
        print(f"The trained model: {saved}")
    return _compare(experiment, snapshot, names) if snapshot else 0


def _say(error: Exception) -> int:
    """Says what cannot be done; returns the exit code."""
    print(f"tools.train: {error}", file=sys.stderr)
    return Code.REFUSED


def _path(text: str | None) -> pathlib.Path | None:
    return pathlib.Path(text) if text else None


def _connect(experiment: Experiment, found: Hosts | None) -> Cluster | None:
    """Connects to the workers, if there are any."""
    if found is None:
        return None
    names = ", ".join(str(host) for host in found.others)
    print(f"tools.train: Connecting to {names}.", file=sys.stderr)
    with doing(f"connecting to {names}"):
        return Cluster(
            found,
            placement.fewest_devices(experiment),
            FLAGS.connect_timeout,
            "tools.train",
            _how_to_go_on(),
            secret.read(FLAGS.secret_file),
            not FLAGS.allow_any_host,
        )


def _snapshot(trainer: Trainer) -> comparison.Snapshot | None:
    """What keeps the weights that a second run is compared with."""
    if not FLAGS.compare_num_partitions:
        return None
    if trainer.earlier_num_steps:
        raise ValueError(
            "--compare_num_partitions needs a run of one length. Received: "
            f"--train_dir={FLAGS.train_dir}, whose run of "
            f"{trainer.earlier_num_steps[-1]} steps was made longer. Give "
            "another --train_dir, or none."
        )
    step = FLAGS.compare_steps or trainer.num_steps
    if not trainer.first_step < step <= trainer.num_steps:
        raise ValueError(
            "--compare_steps must be a step that this run will do, from "
            f"{trainer.first_step + 1} to {trainer.num_steps}. Received: "
            f"{step}. A run that is finished cannot be compared: give "
            "another --train_dir, or none."
        )
    _other(trainer.experiment)  # refused before any work is lost
    return comparison.Snapshot(step, trainer.first_step)


def _other(experiment: Experiment) -> Experiment:
    """What a run is compared with: the same with other cells."""
    return dataclasses.replace(
        experiment,
        num_partitions=FLAGS.compare_num_partitions,
        layers_per_cell=None,
    )


def _how_to_go_on() -> str:
    if not FLAGS.train_dir:
        return "Nothing is kept without a --train_dir."
    return "The same command goes on from the last checkpoint, if there is one."


def _log_dir() -> pathlib.Path | None:
    """For TensorBoard."""
    if not FLAGS.tensorboard:
        return None
    return pathlib.Path(FLAGS.train_dir, "tensorboard")


def _say_every() -> float | None:
    """Seconds between two lines, where there is no progress bar."""
    return None if sys.stdout.isatty() else _SECONDS


def _train(trainer: Trainer, until: int, callbacks: list) -> None:
    """Trains up to a step, and prints on what and how long."""
    model = trainer.model
    print_cells(model.cells())
    k, m = model.num_partitions, model.num_micro_batches
    if model.num_replicas > 1:
        print(f"{model.num_replicas} replicas of {k} cells")
    print(
        f"Ideal bubble of {k} cells and {m} micro-batches, "
        f"schedule={trainer.experiment.schedule}: {ideal_bubble(model):.0%}"
    )
    if trainer.first_step:
        print(f"Resuming after step {trainer.first_step}.")
    if trainer.earlier_num_steps:
        print(
            f"This run had {trainer.earlier_num_steps[-1]} steps at first. It "
            "goes on with the learning rates that the schedule of a run of "
            f"{trainer.num_steps} has for the steps that are left."
        )
    placement.keep_to_cores(trainer.experiment)
    start = time.monotonic()
    trainer.fit(
        callbacks,
        until,
        verbose=1 if sys.stdout.isatty() else 2,
        checkpoint_every=FLAGS.checkpoint_every,
    )
    if trainer.failure is None:
        print(
            f"Trained {until - trainer.first_step} steps with "
            f"num_partitions={k} in {time.monotonic() - start:.0f} s."
        )


def _compare(
    experiment: Experiment,
    snapshot: comparison.Snapshot,
    names: list[str] | None,
) -> int:
    """Trains again with other cells; returns the exit code."""
    k = experiment.num_partitions
    other = _other(experiment)
    print(f"\nThe same again with num_partitions={other.num_partitions}:")
    trainer = Trainer(
        other,
        FLAGS.steps,
        None,
        _path(FLAGS.initial_model),
        placement.strategy(other, names),
        FLAGS.skip_nonfinite,
        skip_outliers=FLAGS.skip_outliers,
    )
    again = comparison.Snapshot(snapshot.step)
    lines = Monitor(trainer, None, say_every=_say_every())
    _train(trainer, snapshot.step, [again, lines])
    result = comparison.difference(snapshot.weights, again.weights)
    took = [_took(experiment, snapshot), _took(other, again)]
    print(f"\n{comparison.table(took).text()}\n")
    print(
        f"num_partitions={k} and num_partitions={other.num_partitions}, "
        f"seed {experiment.seed}, after {snapshot.step} of "
        f"{trainer.num_steps} steps from the same initial weights: {result}."
    )
    return Code.DIFFERENT if result.num_different else Code.FINISHED


def _took(
    experiment: Experiment, snapshot: comparison.Snapshot
) -> tuple[int, float, list[int]]:
    _, prediction = predicted(
        experiment, placement.of_dry_run(experiment), FLAGS.num_replicas
    )
    held = [memory.total for memory in prediction.memory]
    return experiment.num_partitions, snapshot.seconds, held


def parsed(argv: Sequence[str]) -> list[str]:
    """Parses the flags; returns the program and what is no flag."""
    try:
        return FLAGS(list(argv))
    except flags.Error as error:
        sys.exit(_say(error))
    except SystemExit:  # absl's, after it has printed the help
        sys.exit(0)
