"""The process of a case, see `cases`.

It trains a step and says `READY {json}`; "time" is answered by seconds and
bytes, "plan" by predicted bytes, each as `T {json}`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from tools.bench import protocol

NO_MEMORY = "does not fit"
_MIB = 2**20
_PLANNED = (
    "schedule",
    "remat",
    "remat_groups",
    "head_parts",
    "weights_on",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What a process trains, and how.

    Attributes:
        model: "gpt2", "resnet50", "unet", or an experiment of `params`;
            "decoder" and "small_unet" need nothing but Keras.
        library: "keras" or "gpipe" on TensorFlow, "jax" (Keras on JAX), or
            "torch" (PyTorch's model of that size).
        rows: Of a mini-batch.
        k: Devices and cells.
        m: Micro-batches.
        dtype: "float32", or "bfloat16" for mixed precision.
        jit_compile: As `compile` takes it; torch compiles if it is True.
        limit_mib: Of each of the K devices into which the first GPU is cut; 0
            for a GPU that is one device.
        arguments: Others of `tfgpipe.GPipe`. For Keras: those of
            "RematScope", "gradient_accumulation_steps", and whether
            "ModelParallel" shares weights out.
        is_small: Whether the model is a small one, for a rehearsal.
        rounds: Times to measure; the fastest one counts.
        steps: Steps of each.
        keep: A file for the weights after three steps, from others that are
            the same in all cases; "" for none.
        is_exact: Whether the process frees memory at once, and its bytes are
            told, above what it rests at.
    """

    model: str = "gpt2"
    library: str = "gpipe"
    rows: int = 32
    k: int = 1
    m: int = 1
    dtype: str = "bfloat16"
    jit_compile: bool | str = "auto"
    limit_mib: int = 0
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_small: bool = False
    rounds: int = 5
    steps: int = 8
    keep: str = ""
    is_exact: bool = False

    @property
    def name(self) -> str:
        """Returns what is trained, in words."""
        names = {"keras": "Keras", "gpipe": "GPipe", "jax": "Keras on JAX"}
        words = [names.get(self.library, self.library)]
        if self.jit_compile != "auto":
            words.append(f"jit_compile={self.jit_compile}")
        words += [f"{name}={value!r}" for name, value in self.arguments.items()]
        return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class Training:
    """A model that has done its first step.

    Attributes:
        facts: What to say of it.
        fit: Trains for some steps; returns the last loss.
        peaks: Runs something; returns the most MiB that each device held.
        planned: Returns the MiB that a plan says of each device.
    """

    facts: dict[str, Any]
    fit: Callable[[int], float]
    peaks: Callable[[Callable[[], Any]], list[float]]
    planned: Callable[[], list[float]]

    def time(self, rounds: int, steps: int) -> dict[str, Any]:
        """Returns the seconds of a step, and the bytes of the devices.

        A `fit` takes some time for itself: long ones are compared with those
        of one step.
        """
        # (seconds, CPU seconds of all threads) of a `fit`
        taken: dict[int, list[tuple[float, float]]] = {1: [], 1 + steps: []}

        def measure() -> None:
            for _ in range(rounds):
                for count, times in taken.items():
                    start = time.perf_counter(), time.process_time()
                    self.fit(count)
                    end = time.perf_counter(), time.process_time()
                    times.append((end[0] - start[0], end[1] - start[1]))

        peaks = self.peaks(measure)
        found: dict[str, Any] = {"mib": [round(mib) for mib in peaks]}
        for index, name in enumerate(("step_s", "cpu_s")):
            short, long = (
                min(pair[index] for pair in times) for times in taken.values()
            )
            rest = short if short < long else 0.0
            found[name] = (long - rest) / steps
        return found


def main(argv: list[str]) -> None:
    """Does what the only argument, a `Case` in JSON, says."""
    case = Case(**json.loads(argv[1]))
    training: list[Training] = []

    def start() -> dict[str, Any]:
        make = _torch_training if case.library == "torch" else _keras_training
        training.append(make(case))
        return training[0].facts

    protocol.respond(
        _or_error(start),
        {
            "time": lambda: _or_error(
                lambda: training[0].time(case.rounds, case.steps)
            ),
            "plan": lambda: {"plan_mib": _planned(training[0])},
        },
    )


def _planned(training: Training) -> list[int]:
    try:
        return [round(mib) for mib in training.planned()]
    except ValueError:  # what plans do not know, such as shards
        return []


def _or_error(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return action()
    except Exception as error:  # whatever it is, it is a result
        words = f"{type(error).__name__}: {error}"
        is_memory = any(
            sign in words
            for sign in ("ResourceExhausted", "OutOfMemory", "out of memory")
        )
        return {
            "error": NO_MEMORY if is_memory else words[:300],
            "why": words[:200],
        }


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# ------------------------------------------------------------ Keras and tfgpipe
def _keras_training(case: Case) -> Training:
    on_tensorflow = case.library != "jax"
    devices = _devices(case) if on_tensorflow else []
    import keras

    if case.dtype == "bfloat16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    arguments = dict(case.arguments)
    if arguments.pop("ModelParallel", False):
        _share_columns(case.k)
    scope: Any = contextlib.nullcontext()
    if "RematScope" in arguments:
        scope = keras.RematScope(**arguments.pop("RematScope"))
    with scope:
        layers, batch, loss, optimizer = made(case)
    parts = arguments.pop("gradient_accumulation_steps", 1)
    if parts > 1:
        config = optimizer.get_config()
        config["gradient_accumulation_steps"] = parts
        optimizer = type(optimizer).from_config(config)
    model = layers
    if case.library == "gpipe":
        import tfgpipe

        model = tfgpipe.GPipe(
            layers,
            case.k,
            num_micro_batches=case.m,
            devices=devices,
            **arguments,
        )
    elif isinstance(layers, list):
        model = keras.Sequential(layers)
    if case.keep:
        _draw_weights(model)
    model.compile(optimizer, loss, jit_compile=case.jit_compile)
    # (parts of a mini-batch, rows of a part, ...)
    batches = keras.tree.map_structure(
        lambda a: a.reshape(parts, -1, *a.shape[1:]), batch
    )

    def fit(steps: int) -> float:
        data = _data(batches, steps * parts, on_tensorflow)
        history = model.fit(
            data, steps_per_epoch=steps * parts, shuffle=False, verbose=0
        )
        return history.history["loss"][-1]

    losses: list[float] = []
    first = _seconds(lambda: losses.append(fit(1)))
    losses.append(fit(2))
    variables = [*model.variables, *optimizer.variables]
    facts = {
        "first_s": first,
        "losses": losses,
        "parameters": model.count_params(),
        "held_mib": max(_held_mib(variables, on_tensorflow).values()),
        **_machine(on_tensorflow),
    }
    if case.keep:
        _keep_weights(model, case.keep)

    def peaks(run: Callable[[], Any]) -> list[float]:
        if case.is_exact:
            from tools.bench.memory_worker import peak_of_one

            return [peak_of_one(run)]
        if on_tensorflow:
            from tfgpipe.monitor import peak_mib

            return peak_mib(devices, run)
        import jax

        run()
        stats = jax.local_devices()[0].memory_stats() or {}
        return [b / _MIB for n, b in stats.items() if n == "peak_bytes_in_use"]

    return Training(facts, fit, peaks, lambda: _plan(case))


def _data(batches: Any, count: int, on_tensorflow: bool) -> Any:
    """Returns so many mini-batches, the first again after the last."""
    if on_tensorflow:
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(batches)
        return dataset.cache().repeat().take(count)
    import keras

    parts = len(keras.tree.flatten(batches)[0])
    return (
        keras.tree.map_structure(lambda a, i=i: a[i % parts], batches)
        for i in range(count)
    )


def _share_columns(count: int) -> None:
    """Has Keras on JAX share the kernels out, by columns or heads."""
    import keras

    distribution = keras.distribution
    mesh = distribution.DeviceMesh(
        (1, count), ["batch", "model"], distribution.list_devices()
    )
    layout = distribution.LayoutMap(mesh)
    layout[".*(query|key|value).kernel.*"] = (None, "model", None)
    layout[".*attention_output.kernel.*"] = ("model", None, None)
    layout[".*dense(_[0-9]+)?.kernel.*|.*embeddings.*"] = (None, "model")
    layout[".*conv2d(_[0-9]+)?.kernel.*"] = (None, None, None, "model")
    distribution.set_distribution(
        distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )


def _draw_weights(model: Any) -> None:
    """Gives a model weights that are the same with each backend."""
    import numpy as np

    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        shape = tuple(variable.shape)
        if len(shape) > 1:  # others are zeros and ones
            scale = np.prod(shape) / shape[-1]
            drawn = rng.standard_normal(shape) / np.sqrt(scale)
            variable.assign(drawn.astype("float32"))


def _keep_weights(model: Any, path: str) -> None:
    import numpy as np

    np.savez(path, *(np.asarray(v.value) for v in model.trainable_variables))


def _held_mib(variables: list[Any], on_tensorflow: bool) -> dict[str, float]:
    """Returns MiB of weights and slots, by device."""
    held: dict[str, float] = collections.Counter()
    for value in {id(v): v.value for v in variables}.values():
        if on_tensorflow:
            size = value.shape.num_elements() * value.dtype.size
            held[value.device] += size / _MIB
        else:
            for shard in value.addressable_shards:
                held[str(shard.device)] += shard.data.nbytes / _MIB
    return held


def _devices(case: Case) -> list[str]:
    """The first GPU, whole or cut; where there is none, the CPU."""
    import tensorflow as tf

    from tfgpipe.devices import local

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and case.limit_mib:
        local.split_gpu(case.k, case.limit_mib)
    elif gpus:
        tf.config.experimental.set_memory_growth(gpus[0], True)
    elif case.k > 1:
        local.split_cpu(case.k)
    return [f"{'GPU' if gpus else 'CPU'}:{i}" for i in range(case.k)]


def _machine(on_tensorflow: bool) -> dict[str, str]:
    """Card and versions."""
    import keras

    if not on_tensorflow:
        import jax

        card = jax.local_devices()[0].device_kind
        card = "CPU" if card == "cpu" else card
        return {"card": card, "versions": f"jax {jax.__version__}"}
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return {
        "card": details.get("device_name", "CPU"),
        "versions": f"TensorFlow {tf.__version__}, Keras {keras.__version__}",
    }


def _plan(case: Case) -> list[float]:
    """What a plan says of each device, with a model without values."""
    if case.library != "gpipe":
        return []
    import tfgpipe

    with tfgpipe.deferred():
        layers, _, _, optimizer = made(case)
    setting = {"num_partitions": case.k, "num_micro_batches": case.m}
    setting |= {n: v for n, v in case.arguments.items() if n in _PLANNED}
    if len(setting) < 2 + len(case.arguments):
        raise ValueError("Shards are not planned.")
    plan = tfgpipe.plan(
        layers,
        case.rows,
        devices=case.k,
        machine="h100",  # for seconds, which do not matter here
        optimizer=optimizer,
        memory_limit=float("inf"),
        inputs=_inputs(case),
        setting=setting,
    )
    return [count / _MIB for count in plan.device_bytes]


# ------------------------------------------------------------------- the models
def made(case: Case) -> tuple[Any, tuple[Any, Any], Any, Any]:
    """Makes a model, or its layers, a mini-batch, loss and optimizer."""
    import keras
    import numpy as np

    if "." in case.model:
        return _experiment(case)
    rng = np.random.default_rng(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-4)
    if case.model == "gpt2":
        sizes = gpt2_sizes(case)
        shape = case.rows, sizes["max_sequence_length"] + 1
        ids = rng.integers(0, sizes["vocabulary_size"], shape).astype("int32")
        mask = np.ones((case.rows, shape[1] - 1), "int32")
        x: Any = {"token_ids": ids[:, :-1], "padding_mask": mask}
        return _gpt2(sizes), (x, ids[:, 1:]), loss, optimizer
    if case.model == "decoder":
        words, tokens, units, blocks = (
            (50, 8, 16, 2) if case.is_small else (1000, 64, 128, 12)
        )
        ids = rng.integers(0, words, (case.rows, tokens + 1)).astype("int32")
        model = _decoder(words, tokens, units, blocks)
        return model, (ids[:, :-1], ids[:, 1:]), loss, optimizer
    size, classes = (32, 5) if case.is_small else (224, 1000)
    if case.model == "small_unet":
        size = 16 if case.is_small else 64
        x = rng.random((case.rows, size, size, 3), "float32")
        y = rng.integers(0, 2, (case.rows, size, size)).astype("int32")
        return _unet(size, 3, size // 4), (x, y), loss, optimizer
    x = rng.random((case.rows, size, size, 3), "float32")
    if case.model == "unet":
        model = _unet(size, *((2, 4) if case.is_small else (5, 64)))
        y = rng.integers(0, 2, (case.rows, size, size)).astype("int32")
        return model, (x, y), loss, optimizer
    model = keras.applications.ResNet50(
        weights=None,
        input_shape=(size, size, 3),
        classes=classes,
        classifier_activation=None,
    )
    y = rng.integers(0, classes, (case.rows,)).astype("int32")
    return model, (x, y), loss, optimizer


def gpt2_sizes(case: Case) -> dict[str, int]:
    """Returns the sizes of a backbone of KerasHub."""
    blocks, units, words, tokens = (
        (2, 16, 50, 8) if case.is_small else (12, 768, 50257, 512)
    )
    return {
        "vocabulary_size": words,
        "num_layers": blocks,
        "num_heads": max(1, units // 64),
        "hidden_dim": units,
        "intermediate_dim": 4 * units,
        "max_sequence_length": tokens,
    }


def _gpt2(sizes: dict[str, int]) -> Any:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(**sizes, dropout=0.0)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def _decoder(words: int, tokens: int, units: int, num_blocks: int) -> Any:
    """A model such as GPT-2, of Keras's layers; a block is a layer."""
    import keras
    from keras import layers as kl

    class Block(kl.Layer):
        def build(self, shape: Any) -> None:
            """Makes the layers inside."""
            self.norms = [kl.LayerNormalization() for _ in range(2)]
            self.attention = kl.MultiHeadAttention(4, units // 4)
            self.wide = kl.Dense(4 * units, "gelu")
            self.narrow = kl.Dense(units)
            self.attention.build(shape, shape)
            for layer in (*self.norms, self.wide):
                layer.build(shape)
            self.narrow.build((*shape[:-1], 4 * units))

        def call(self, x: Any) -> Any:
            """Attends to earlier positions, then computes each alone."""
            y = self.norms[0](x)
            x = x + self.attention(y, y, use_causal_mask=True)
            return x + self.narrow(self.wide(self.norms[1](x)))

    class Positions(kl.Layer):
        def build(self, shape: Any) -> None:
            """Makes a vector for each position."""
            self.embeddings = self.add_weight(shape[1:], name="embeddings")

        def call(self, x: Any) -> Any:
            """Adds them."""
            return x + self.embeddings

    ids = keras.Input((tokens,), dtype="int32")
    x = kl.Embedding(words, units)(ids)
    x = Positions()(x)
    for index in range(num_blocks):
        x = Block(name=f"block_{index}")(x)
    return keras.Model(ids, kl.Dense(words)(kl.LayerNormalization()(x)))


def _unet(size: int, depth: int, filters: int) -> Any:
    """Two convolutions at each of `depth` resolutions, down and up again."""
    import keras
    from keras import layers as kl

    def convolved(x: Any, count: int) -> Any:
        for _ in range(2):
            x = kl.Conv2D(count, 3, padding="same", use_bias=False)(x)
            x = kl.ReLU()(kl.BatchNormalization()(x))
        return x

    inputs = x = keras.Input((size, size, 3))
    shortcuts = []
    counts = [filters * 2**level for level in range(depth)]
    for count in counts[:-1]:
        x = convolved(x, count)
        shortcuts.append(x)
        x = kl.MaxPooling2D()(x)
    x = convolved(x, counts[-1])
    for count, shortcut in zip(counts[-2::-1], reversed(shortcuts)):
        x = kl.Conv2DTranspose(count, 2, 2)(x)
        x = convolved(kl.Concatenate()([shortcut, x]), count)
    return keras.Model(inputs, kl.Conv2D(2, 1)(x))


def _experiment(case: Case) -> tuple[Any, tuple[Any, Any], Any, Any]:
    """Makes the layers of an experiment, and its first mini-batch."""
    import keras

    import params

    experiment = params.get(case.model)
    batches = experiment.data.source().train(
        case.rows, seed=0, first_step=0, num_steps=1
    )
    x, y = next(iter(batches))
    layers = [keras.Input(x.shape[1:], dtype=x.dtype.name)]
    return (
        [*layers, *experiment.model.layers()],
        (x.numpy(), y.numpy()),
        experiment.task.compile_arguments()["loss"],
        experiment.optimizer.make(1000),
    )


def _inputs(case: Case) -> Any:
    """The inputs of a plan, where a model leaves their sizes open."""
    import keras

    if case.model != "gpt2":
        return None
    shape = (gpt2_sizes(case)["max_sequence_length"],)
    return {
        name: keras.Input(shape, dtype="int32", name=name)
        for name in ("token_ids", "padding_mask")
    }


# --------------------------------------------------------------------- PyTorch
def _torch_training(case: Case) -> Training:
    """GPT-2 of the transformers package: TF32, fused Adam, autocast."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    is_gpu = torch.cuda.is_available()
    device = "cuda" if is_gpu else "cpu"
    sizes = gpt2_sizes(case)
    tokens = sizes["max_sequence_length"]
    config = transformers.GPT2Config(
        vocab_size=sizes["vocabulary_size"],
        n_positions=tokens,
        n_embd=sizes["hidden_dim"],
        n_layer=sizes["num_layers"],
        n_head=sizes["num_heads"],
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        attn_implementation="sdpa",
    )
    net = transformers.GPT2LMHeadModel(config).to(device).train()
    shape = case.rows, tokens
    ids = torch.randint(0, config.vocab_size, shape, device=device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-4, fused=is_gpu)
    if case.jit_compile is True:
        net.compile()

    def fit(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            is_mixed = case.dtype == "bfloat16"
            with torch.autocast(device, torch.bfloat16, enabled=is_mixed):
                loss = net(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        return float(loss)  # waits for the GPU

    first = _seconds(lambda: fit(1))
    facts = {
        "first_s": first,
        "losses": [fit(2)],
        "parameters": sum(p.numel() for p in net.parameters()),
        "card": torch.cuda.get_device_name() if is_gpu else "CPU",
        "versions": f"torch {torch.__version__}",
    }

    def peaks(run: Callable[[], Any]) -> list[float]:
        torch.cuda.reset_peak_memory_stats()
        run()
        return [torch.cuda.max_memory_allocated() / _MIB] if is_gpu else []

    return Training(facts, fit, peaks, lambda: [])


if __name__ == "__main__":
    main(sys.argv)
