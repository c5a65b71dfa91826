"""What `python -m tools.train` does, from its flags to its exit code."""

import dataclasses
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence

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
from tools.train.trainer import Trainer

_REFUSED = (ValueError, FileNotFoundError, ImportError)


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
            names is None or FLAGS.shared_train_dir,
            saves_on_signal=bool(FLAGS.train_dir),
        )
        if FLAGS.check:
            report = trainer.check()
            print(report)
            return Code.FINISHED if report.is_exact else Code.DIFFERENT
        if FLAGS.compare_num_partitions:
            other = dataclasses.replace(  # refused before any work is lost
                experiment,
                num_partitions=FLAGS.compare_num_partitions,
                layers_per_cell=None,
            )
    except _REFUSED as error:
        return _say(error)
    print(experiment)
    callbacks = [*watching]
    if FLAGS.pipeline_monitor:
        callbacks.append(PipelineMonitor())
    try:
        seconds = _train(trainer, callbacks)
        if trainer.failure is not None:
            print(f"tools.train: {trainer.failure}", file=sys.stderr)
            return Code.NOT_FINITE
        _test(trainer)
    except OSError as error:
        print(f"\ntools.train: {error}\n{_how_to_go_on()}", file=sys.stderr)
        return Code.FILES
    if not FLAGS.compare_num_partitions:
        return Code.FINISHED
    print(f"\nThe same again with num_partitions={other.num_partitions}:")
    again = Trainer(
        other,
        FLAGS.steps,
        None,
        _path(FLAGS.initial_model),
        placement.strategy(other, names),
    )
    took = [_took(experiment, seconds), _took(other, _train(again, []))]
    print(f"\n{comparison.table(took).text()}\n")
    result = comparison.difference(
        *(one.model.get_weights() for one in (trainer, again))
    )
    print(
        f"num_partitions={experiment.num_partitions} and num_partitions="
        f"{other.num_partitions}, seed {experiment.seed}, after "
        f"{trainer.num_steps} steps from the same initial weights: {result}."
    )
    return Code.DIFFERENT if result.num_different else Code.FINISHED


def _test(trainer: Trainer) -> None:
    """Tests and exports."""
    experiment = trainer.experiment
    if trainer.model.num_skipped:
        print(
            f"Skipped {trainer.model.num_skipped} mini-batches that were not "
            "finite."
        )
    print(experiment.task.summary(trainer.evaluate()))
    if experiment == params.get(experiment.name) and not FLAGS.steps:
        print(f"Expected: {experiment.expected_result}")
    if saved := trainer.export():
        print(f"The trained model: {saved}")


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


def _how_to_go_on() -> str:
    if not FLAGS.train_dir:
        return "Nothing is kept without a --train_dir."
    return "The same command goes on from the last checkpoint, if there is one."


def _train(
    trainer: Trainer, callbacks: list[keras.callbacks.Callback]
) -> float:
    """Trains, and prints on what and how long; returns seconds of a step."""
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
    placement.keep_to_cores(trainer.experiment)
    start, watch = time.monotonic(), comparison.Stopwatch()
    trainer.fit(
        [*callbacks, watch],
        verbose=1 if sys.stdout.isatty() else 2,
        checkpoint_every=FLAGS.checkpoint_every,
    )
    if trainer.failure is None:
        print(
            f"Trained {trainer.num_steps - trainer.first_step} steps with "
            f"num_partitions={k} in {time.monotonic() - start:.0f} s."
        )
    return watch.seconds


def _took(
    experiment: Experiment, seconds: float
) -> tuple[int, float, list[int]]:
    _, prediction = predicted(
        experiment, placement.of_dry_run(experiment), FLAGS.num_replicas
    )
    held = [memory.total for memory in prediction.memory]
    return experiment.num_partitions, seconds, held


def parsed(argv: Sequence[str]) -> list[str]:
    """Parses the flags; returns the program and what is no flag."""
    try:
        return FLAGS(list(argv))
    except flags.Error as error:
        sys.exit(_say(error))
    except SystemExit:  # absl's, after it has printed the help
        sys.exit(0)
