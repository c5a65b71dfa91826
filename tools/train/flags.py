"""The flags of `tools.train`, and the experiment that they describe."""

import dataclasses

from absl import flags

import params
from params import Experiment, registry
from tools.flags import define

FLAGS = flags.FLAGS

define(
    FLAGS,
    params=(str, "Name of the experiment; see --list."),
    list=(False, "Print all experiments and stop."),
    dry_run=(
        False,
        "Print what each device would hold, and stop; nothing is allocated.",
    ),
    check=(
        False,
        "Compare a step on the first mini-batch with plain Keras, layer by "
        "layer, and stop; with exit code 1 if anything differs that is not "
        "documented.",
    ),
    num_partitions=(int, "K, the number of cells."),
    num_replicas=(1, "R, pipelines that share every mini-batch."),
    num_micro_batches=(
        int,
        "M, the micro-batches of a mini-batch; with replicas, of each replica.",
    ),
    schedule=(str, "Order of the tasks on each device."),
    remat=(str, "What the backward pass recomputes."),
    batch_size=(int, "Examples in a mini-batch."),
    epochs=(int, "Times to go through the data."),
    steps=(int, "Mini-batches, instead of --epochs."),
    seed=(int, "Of initial weights and data order.", 0),
)
flags.DEFINE_multi_string(
    "set", [], "Another field: --set=model.num_filters=64. Repeatable."
)
define(
    FLAGS,
    train_dir=(str, "Folder for checkpoints and final.keras."),
    checkpoint_every=(
        int,
        "Steps from one checkpoint to the next. Default: one after every "
        "epoch.",
    ),
    shared_train_dir=(
        False,
        "With --workers or --tpu: all hosts have the --train_dir in common, "
        "and each writes what it has. If not, this process writes it all.",
    ),
    pipeline_monitor=(
        False,
        "Measure a step an epoch: bubble, slowest cell, and what would help.",
    ),
    initial_model=(
        str,
        "The final.keras to start from, for experiments that start from "
        "another.",
    ),
    num_virtual_devices=(
        int,
        "Split the CPU into so many devices; interleaved cells share them. "
        "Default: where there is no accelerator, a device for each cell.",
    ),
    compare_num_partitions=(
        int,
        "Train a second time with so many cells, compare the weights, and exit "
        "with 1 if any bit differs.",
    ),
    cores_per_device=(
        int,
        "Keep the run to so many cores of the CPU for each of its devices, as "
        "if there were no others. Linux only. Default: devices share all "
        "cores.",
    ),
    workers=(
        str,
        "Hosts with the devices, host:port,host:port; on each of them runs "
        "`tfgpipe worker`. Instead, TF_CONFIG may name the hosts of a cluster "
        "that all run this command.",
    ),
    allow_any_host=(
        False,
        "Let any host use TensorFlow's port, and not those of the run alone.",
    ),
    secret_file=(
        str,
        "What only the hosts of this run know; the same file on all. Default: "
        "~/.config/tfgpipe/secret.",
    ),
    tpu=(
        str,
        'The TPU with the devices: "local" on a TPU VM; else its name, or the '
        "address of its first host, grpc://host:port.",
    ),
    connect_timeout=(60.0, "Seconds to wait for other hosts, or a TPU.", 1.0),
)

_FIELDS = (
    "num_partitions",
    "num_micro_batches",
    "schedule",
    "remat",
    "batch_size",
    "epochs",
    "seed",
)


def experiment_of(argv: list[str]) -> Experiment:
    """The experiment that the flags describe."""
    if len(argv) > 1:
        raise ValueError(f"Expected only flags. Received: {argv[1:]}.")
    if FLAGS.params is None:
        raise ValueError(
            f"--params must name an experiment. {registry.HOW_TO_LIST}"
        )
    if FLAGS.steps and FLAGS.epochs:
        raise ValueError(
            "--steps and --epochs must not be given both. Received: "
            f"--steps={FLAGS.steps} and --epochs={FLAGS.epochs}."
        )
    if FLAGS.checkpoint_every and not FLAGS.train_dir:
        raise ValueError("--checkpoint_every needs a --train_dir to write to.")
    given = {name: FLAGS[name].value for name in _FIELDS}
    given = {name: v for name, v in given.items() if v is not None}
    experiment = params.override(params.get(FLAGS.params), FLAGS.set)
    experiment = dataclasses.replace(experiment, **given)
    parts = FLAGS.num_replicas * experiment.num_micro_batches
    if parts > experiment.batch_size:
        raise ValueError(
            "--num_replicas times the micro-batches of each must be at most "
            f"the batch size, {experiment.batch_size}. Received: --num_replicas"
            f"={FLAGS.num_replicas}, with {experiment.num_micro_batches} "
            "micro-batches each. Give fewer --num_micro_batches."
        )
    return experiment
