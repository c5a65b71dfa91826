"""The flags of `tools.train`, and the experiment that they describe."""

import dataclasses

from absl import flags

import params
from params import Experiment, registry

FLAGS = flags.FLAGS

flags.DEFINE_string("params", None, "Name of the experiment; see --list.")
flags.DEFINE_boolean("list", False, "Print all experiments and stop.")
flags.DEFINE_boolean(
    "dry_run",
    False,
    "Print what each device would hold, and stop; nothing is allocated.",
)
flags.DEFINE_boolean(
    "check",
    False,
    "Compare a step on the first mini-batch with plain Keras, layer by layer, "
    "and stop; with exit code 1 if anything differs that is not documented.",
)
flags.DEFINE_string(
    "plan",
    None,
    "Choose cells, micro-batches, schedule, remat and cut: those that are "
    "predicted to be fastest on this machine, such as v100. See tools.plan.",
)
flags.DEFINE_integer("num_partitions", None, "K, the number of cells.", 1)
flags.DEFINE_integer(
    "num_replicas", 1, "R, pipelines that share every mini-batch.", 1
)
flags.DEFINE_integer(
    "num_micro_batches",
    None,
    "M, the micro-batches of a mini-batch; with replicas, of each replica.",
    1,
)
flags.DEFINE_string("schedule", None, "Order of the tasks on each device.")
flags.DEFINE_string("remat", None, "What the backward pass recomputes.")
flags.DEFINE_integer("batch_size", None, "Examples in a mini-batch.", 1)
flags.DEFINE_integer(
    "epochs",
    None,
    "Times to go through the data. More make a finished run longer.",
    1,
)
flags.DEFINE_integer("steps", None, "Mini-batches, instead of --epochs.", 1)
flags.DEFINE_integer("seed", None, "Of initial weights and data order.", 0)
flags.DEFINE_multi_string(
    "set", [], "Another field: --set=model.num_filters=64. Repeatable."
)
flags.DEFINE_string(
    "train_dir", None, "Folder for checkpoints and final.keras."
)
flags.DEFINE_boolean(
    "skip_nonfinite",
    True,
    "Skip mini-batches with a loss or a gradient that is not finite; ten in a "
    "row end the run, with exit code 4.",
)
flags.DEFINE_float(
    "skip_outliers",
    None,
    "Skip mini-batches, too, that are so many times as far above the median of "
    "the last ones as their 90% quantile is: 10, say. Default: none.",
)
flags.DEFINE_integer(
    "checkpoint_every",
    None,
    "Steps from one checkpoint to the next. Default: one after every epoch.",
    1,
)
flags.DEFINE_boolean(
    "shared_train_dir",
    False,
    "With --workers or --tpu: all hosts have the --train_dir in common, and "
    "each writes what it has. If not, this process writes it all.",
)
flags.DEFINE_integer(
    "evaluate_every",
    None,
    "Steps from one test to the next. Default: one at the end.",
    1,
)
flags.DEFINE_boolean(
    "tensorboard",
    False,
    "Write loss, speed, bubble and memory to TRAIN_DIR/tensorboard.",
)
flags.DEFINE_boolean(
    "pipeline_monitor",
    False,
    "Measure a step an epoch: bubble, slowest cell, and what would help.",
)
flags.DEFINE_string(
    "initial_model",
    None,
    "The final.keras to start from, for experiments that start from another.",
)
flags.DEFINE_integer(
    "num_virtual_devices",
    None,
    "Split the CPU into so many devices; interleaved cells share them. "
    "Default: where there is no accelerator, a device for each cell.",
    1,
)
flags.DEFINE_integer(
    "compare_num_partitions",
    None,
    "Train a second time with so many cells, compare the weights, and exit "
    "with 1 if any bit differs.",
    1,
)
flags.DEFINE_integer(
    "cores_per_device",
    None,
    "Keep the run to so many cores of the CPU for each of its devices, as if "
    "there were no others. Linux only. Default: devices share all cores.",
    1,
)
flags.DEFINE_integer(
    "compare_steps", None, "Compare after so many steps. Default: all.", 1
)
flags.DEFINE_string(
    "workers",
    None,
    "Hosts with the devices, host:port,host:port; on each of them runs "
    "`tfgpipe worker`. Instead, TF_CONFIG may name the hosts of a cluster that "
    "all run this command.",
)
flags.DEFINE_boolean(
    "allow_any_host",
    False,
    "Let any host use TensorFlow's port, and not those of the run alone.",
)
flags.DEFINE_string(
    "secret_file",
    None,
    "What only the hosts of this run know; the same file on all. Default: "
    "~/.config/tfgpipe/secret.",
)
flags.DEFINE_string(
    "tpu",
    None,
    'The TPU with the devices: "local" on a TPU VM; else its name, or the '
    "address of its first host, grpc://host:port.",
)
flags.DEFINE_float(
    "connect_timeout", 60.0, "Seconds to wait for other hosts, or a TPU.", 1.0
)

_PLANNED = ("num_partitions", "num_micro_batches", "schedule", "remat")
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
    """The experiment that the flags describe.

    Args:
        argv: The program, and what is no flag.

    Raises:
        ValueError: If they do not go together.
    """
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
    if FLAGS.plan is not None:
        for name in (
            "num_partitions",
            "num_micro_batches",
            "schedule",
            "remat",
        ):
            if FLAGS[name].value is not None:
                raise ValueError(
                    f"--plan and --{name} must not be given both. Received: "
                    f"--plan={FLAGS.plan} and --{name}={FLAGS[name].value}. "
                    "The plan chooses it: leave one out."
                )
    if FLAGS.compare_steps and not FLAGS.compare_num_partitions:
        raise ValueError("--compare_steps needs --compare_num_partitions.")
    for name in ("checkpoint_every", "tensorboard"):
        if FLAGS[name].value and not FLAGS.train_dir:
            raise ValueError(f"--{name} needs a --train_dir to write to.")
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
