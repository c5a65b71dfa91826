"""Trains a Transformer on accelerators with little memory, if it fits.

It has an embedding, as many blocks as it is asked for, and one output for each
position, so that what is fed to the devices is small.

Every trial has processes of its own: the accelerators, and one that builds the
model on their devices and trains a few steps. Naive is plain Keras on one
accelerator.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tools.bench import memory_worker
from tools.bench.memory_worker import Accelerators, Memory

_MIB = 2**20
_DIES_SECONDS = 10.0
_VOCABULARY = 256
_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


class Size(NamedTuple):
    """The width of the layers and what they are trained on.

    Attributes:
        width: Units of a position; four times as many between dense layers.
        num_heads: Heads of the attention.
        sequence: Positions in an example.
        batch_size: Examples in a mini-batch.
        optimizer: "adam", which keeps two slots for a weight, or "sgd".
    """

    width: int = 64
    num_heads: int = 4
    sequence: int = 64
    batch_size: int = 256
    optimizer: str = "adam"

    @property
    def boundary_mib(self) -> float:
        """What is between two layers, for the mini-batch."""
        return 4 * self.batch_size * self.sequence * self.width / _MIB


class Job(NamedTuple):
    """What to train.

    Attributes:
        size: Of the layers.
        num_layers: Transformer blocks.
        k: Accelerators and cells; 0 is plain Keras on one accelerator.
        m: Micro-batches.
        schedule: As in `tfgpipe.GPipe`.
        remat: As in `tfgpipe.GPipe`.
        limit_mib: What an accelerator may use above a process without a
            model; 0 is no limit.
        chunks: Cells of an accelerator.
        remat_groups: As in `tfgpipe.GPipe`.
        num_steps: Steps whose peak is measured, after two others.
        is_on_host: Whether weights and slots are in the memory of the process
            that trains.
        words: Of which each position's next one is to be found; 0 for one
            number a position.
        head_parts: As in `tfgpipe.GPipe`.
    """

    size: Size
    num_layers: int
    k: int
    m: int = 1
    schedule: str = "gpipe"
    remat: str | float = "except_last"
    limit_mib: float = 0
    chunks: int = 1
    remat_groups: int | None = 1
    num_steps: int = 1
    is_on_host: bool = False
    words: int = 0
    head_parts: int = 1


class Use(NamedTuple):
    """What an accelerator uses its memory for, in MiB.

    Attributes:
        held: Weights and the optimizer's slots.
        gradients: One gradient for each weight.
        activations: The peak of a step above what it rests at, without the
            gradients.
        other: What the process rests at, without `held` and the process as it
            was before the model: TensorFlow's graphs and buffers.
    """

    held: float
    gradients: float
    activations: float
    other: float


class Outcome(NamedTuple):
    """How a trial went.

    Attributes:
        num_parameters: The model's.
        uses: What each accelerator uses; empty if the memory did not suffice.
        seconds: Of a step, the median.
        why: How it shows that the memory did not suffice.
    """

    num_parameters: int = 0
    uses: tuple[Use, ...] = ()
    seconds: float = 0.0
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether the model was trained."""
        return bool(self.uses)

    def most(self, name: str) -> float:
        """The largest of the accelerators' values."""
        return max(getattr(use, name) for use in self.uses)


def run(job: Job, seconds: float = 900) -> Outcome:
    """Trains in new processes, or finds that the memory does not suffice."""
    accelerators = Accelerators(max(job.k, 1))
    process = None
    try:
        process, connection = memory_worker.start(
            _run,
            job,
            accelerators.cluster,
            accelerators.connections,
            accelerators.log,
        )
        if not connection.poll(seconds):
            raise RuntimeError(f"{job} took more than {seconds} s.")
        return _judge(job, connection, accelerators)
    finally:
        if process is not None:
            memory_worker.stop(process)
        accelerators.close()


def _judge(
    job: Job, connection: Connection, accelerators: Accelerators
) -> Outcome:
    try:
        outcome, error = connection.recv()
    except EOFError:
        outcome, error = None, "The training process died."
    if outcome is not None:
        return outcome
    if why := accelerators.out_of_memory(_DIES_SECONDS):
        return Outcome(why=why)
    raise RuntimeError(f"{job} failed: {error}")


# ------------------------------------------------------ in the training process
def _run(
    connection: Connection,
    job: Job,
    cluster: dict,
    accelerators: list[Connection],
    log: pathlib.Path,
) -> None:
    """Sends an outcome, or an error."""
    memory_worker.log_to(log)
    try:
        _connect(cluster, accelerators)
        connection.send((_outcome(job, accelerators), ""))
    except Exception as error:  # whatever it is, it is passed on
        connection.send((None, f"{type(error).__name__}: {error}"))


def _connect(cluster: dict, accelerators: list[Connection]) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(cluster))
    for task in range(len(accelerators)):  # their threads start
        with tf.device(memory_worker.device(task)):
            float(tf.reduce_sum(tf.ones((64, 64))))


def _outcome(job: Job, accelerators: list[Connection]) -> Outcome:
    bare = memory_worker.ask(accelerators, "rest")
    if job.limit_mib:
        memory_worker.ask(accelerators, "limit", job.limit_mib)
    model, step = _model(job)
    for _ in range(2):  # the first one traces
        step()
    rest = memory_worker.ask(accelerators, "rest")
    seconds = []
    for _ in range(job.num_steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = memory_worker.ask(accelerators, "memory")
    return Outcome(
        model.count_params(),
        tuple(_uses(model, bare, rest, peak)),
        statistics.median(seconds),
    )


def _model(job: Job) -> tuple[Any, Callable[[], Any]]:
    """The model on its devices, and what trains it for a step."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpipe

    size = job.size
    keras.utils.set_random_seed(0)
    layers = layers_of(job)
    optimizer = keras.optimizers.get(optimizer_of(job))
    if job.k == 0:
        device = memory_worker.device(0)

        class Naive(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                with tf.device(device):
                    return super().train_step(data)

        with tf.device(device):
            model = Naive(layers)
            optimizer.build(model.trainable_variables)
    else:
        model = tfgpipe.GPipe(
            layers,
            num_partitions=job.k * job.chunks,
            num_micro_batches=job.m,
            devices=[memory_worker.device(k) for k in range(job.k)],
            layers_per_cell=cut_of(job),
            schedule=job.schedule,
            remat=job.remat,
            remat_groups=job.remat_groups,
            head_parts=job.head_parts,
            weights_on=_HOST if job.is_on_host else "devices",
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss if job.words else "mse", jit_compile=False)
    shape = (size.batch_size, size.sequence)
    x = np.random.default_rng(0).integers(0, _VOCABULARY, shape, "int32")
    y = x % job.words if job.words else np.zeros((*shape, 1), "float32")
    return model, lambda: model.train_on_batch(x, y)


def layers_of(job: Job) -> list[Any]:
    """What is trained, after its `keras.Input`."""
    import keras

    from tools.bench.models import TransformerBlock

    size = job.size
    layers = [
        keras.Input((size.sequence,), dtype="int32"),
        keras.layers.Embedding(_VOCABULARY, size.width),
    ]
    layers += [
        TransformerBlock(size.num_heads, 4 * size.width)
        for _ in range(job.num_layers)
    ]
    return [*layers, keras.layers.Dense(job.words or 1, name="head")]


def optimizer_of(job: Job) -> dict[str, Any]:
    """Its optimizer, as `keras.optimizers.get` takes it."""
    names = {"adam": "Adam", "sgd": "SGD"}
    name = names[job.size.optimizer]
    return {"class_name": name, "config": {"learning_rate": 1e-3}}


def cut_of(job: Job) -> list[int]:
    """Layers a cell: blocks, and a layer more at either end."""
    num_cells = job.k * job.chunks
    blocks, rest = divmod(job.num_layers, num_cells)
    cut = [blocks + (cell < rest) for cell in range(num_cells)]
    cut[0] += 1
    cut[-1] += 1
    return cut


def _uses(
    model: Any, bare: list[Memory], rest: list[Memory], peak: list[Memory]
) -> list[Use]:
    uses = []
    for task in range(len(bare)):
        device = memory_worker.device(task)
        trainable = mib_on(model.trainable_variables, device)
        held = mib_on([*model.variables, *model.optimizer.variables], device)
        above = peak[task].peak - rest[task].resident
        grown = rest[task].resident - bare[task].resident
        uses.append(Use(held, trainable, above - trainable, grown - held))
    return uses


def mib_on(variables: list[Any], device: str) -> float:
    """The size of the variables on a device."""
    found = {id(v): v.value for v in variables if v.value.device == device}
    return (
        sum(
            value.shape.num_elements() * value.dtype.size
            for value in found.values()
        )
        / _MIB
    )
