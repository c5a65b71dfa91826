"""Trains on a device that runs nothing but what XLA compiles, as a TPU does.

python tests/compiled_device.py NAME ...
python tests/compiled_device.py --workers NAME ...

TensorFlow has such a device for the CPU, XLA_CPU, one a process: here it is
beside a CPU, or there are four, in workers of their own. It prints a line of
JSON for each case: by how much weights, history and outputs differ from plain
Keras, and where the weights are.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

if __name__ == "__main__":  # before TensorFlow starts
    os.environ["TF_XLA_FLAGS"] = "--tf_xla_enable_xla_devices"
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import optimizers as ko

import tfgpipe

DEVICES = ["/device:XLA_CPU:0", "/device:CPU:0"]
ROWS, BATCH = 10, 4
RNG = np.random.default_rng(0)
Y = RNG.normal(size=(ROWS, 2)).astype("float32")
VECTORS = RNG.normal(size=(ROWS, 16)).astype("float32")
TOKENS = RNG.integers(1, 9, (ROWS, 5)) * (
    np.arange(5) < RNG.integers(1, 6, (ROWS, 1))
).astype("int32")


def momentum():
    return ko.SGD(0.05, momentum=0.9)


def dense():
    return [
        kl.Dense(8, "relu"),
        kl.Dense(8, kernel_regularizer="l2"),
        kl.LayerNormalization(),
        kl.Dense(2),
    ]


def normalised():
    return [kl.Dense(8), kl.BatchNormalization(), kl.Dense(8), kl.Dense(2)]


def embedded():
    return [
        kl.Embedding(9, 8, mask_zero=True),
        kl.Dense(8),
        kl.GlobalAveragePooling1D(),
        kl.Dense(2),
    ]


def recommending():
    """A table beside layers that are small."""
    return [
        keras.Input((5,), dtype="int32"),
        kl.Embedding(90, 8),
        kl.Flatten(),
        kl.Dense(8, "relu"),
        kl.Dense(2),
    ]


def recurrent():
    return [kl.Embedding(9, 8, mask_zero=True), kl.LSTM(8), kl.Dense(2)]


def convolved():
    return [
        kl.Reshape((4, 4, 1)),
        kl.Conv2D(4, 3, padding="same"),
        kl.MaxPooling2D(),
        kl.Flatten(),
        kl.Dense(2),
    ]


class SelfAttention(kl.Layer):
    def __init__(self):
        super().__init__()
        self.inner = kl.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, x):
        return x + self.inner(x, x)


def attending():
    return [kl.Reshape((4, 4)), SelfAttention(), kl.Flatten(), kl.Dense(2)]


# Layers, inputs, optimizer, and arguments of the `GPipe`: devices by index.
CASES = {
    "dense": (dense, VECTORS, ko.Adam, {}),
    "saved": (dense, VECTORS, ko.Adam, {}),
    "1f1b": (dense, VECTORS, ko.Adam, {"schedule": "1f1b"}),
    "zero_bubble": (dense, VECTORS, momentum, {"schedule": "zero_bubble"}),
    "never": (dense, VECTORS, ko.Adam, {"remat": "never"}),
    "always": (dense, VECTORS, ko.Adam, {"remat": "always"}),
    "last cell": (dense, VECTORS, ko.Adam, {"devices": [1, 0]}),
    "one cell": (dense, VECTORS, ko.Adam, {"devices": [0]}),
    "batch normalisation": (
        normalised,
        VECTORS,
        momentum,
        {"num_micro_batches": 1},
    ),
    "embedding": (embedded, TOKENS, momentum, {}),
    "masks": (embedded, TOKENS, ko.Adam, {"devices": [1, 0]}),
    "table on the host": (
        recommending,
        TOKENS,
        momentum,
        {"devices": [1, 0], "layers_per_cell": [1, 3], "schedule": "1f1b"},
    ),
    "recurrent": (recurrent, TOKENS, momentum, {"remat": "always"}),
    "convolution": (convolved, VECTORS, ko.Adam, {}),
    "attention": (attending, VECTORS, momentum, {}),
    "clipping": (
        dense,
        VECTORS,
        lambda: ko.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        {},
    ),
    "averages": (
        dense,
        VECTORS,
        lambda: ko.AdamW(0.01, weight_decay=0.1, use_ema=True, clipnorm=0.5),
        {},
    ),
    "loss scaling": (
        dense,
        VECTORS,
        lambda: ko.LossScaleOptimizer(ko.Adam(0.01), initial_scale=1024.0),
        {},
    ),
    "skipping": (dense, VECTORS, ko.Adam, {"skip_nonfinite": True}),
}
# They need four devices.
WITH_REPLICAS = {
    "replicas": (dense, VECTORS, ko.Adam, {}),
    "replicas of 1f1b": (dense, VECTORS, momentum, {"schedule": "1f1b"}),
    "replicas of embeddings": (embedded, TOKENS, momentum, {}),
}
# Where all devices are such ones, Adam moves all rows of an embedding, and
# says so.
ON_HOST = ["masks", "table on the host"]
IN_WORKERS = [name for name in CASES if name not in ON_HOST] + [*WITH_REPLICAS]


def trained(make_model, x, optimizer):
    keras.utils.set_random_seed(1)
    model = make_model()
    model.build((None, *x.shape[1:]))
    drawn = model.get_weights()  # by the host, or XLA would draw others
    rng = np.random.default_rng(1)  # some that do not magnify rounding
    model.set_weights(
        [
            0.3 * rng.normal(size=w.shape) if len(w.shape) > 1 else w.numpy()
            for w in model.weights
        ]
    )
    eagerly = not isinstance(model, tfgpipe.GPipe)
    model.compile(optimizer(), "mse", metrics=["mae"], run_eagerly=eagerly)
    return model, (drawn, *fitted(model, x))


def fitted(model, x):
    fit = {"epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, Y, BATCH, **fit).history
    history.pop("skipped_steps", None)
    return (
        [w.numpy() for w in model.weights],
        [history[name] for name in sorted(history)],
        model.evaluate(x, Y, BATCH, verbose=0),
        model.predict(x, BATCH, verbose=0),
    )


def check_table(model, x):
    """Of the weights, only the table is on the host; its gradient is sparse."""
    on_host = [w.path for w in model.weights if "XLA" not in w.value.device]
    assert [path.split("/")[-1] for path in on_host] == ["embeddings"], on_host
    applied, apply = [], model.optimizer.apply_gradients
    model.optimizer.apply_gradients = lambda pairs: (
        applied.extend(pairs) or apply(applied)
    )
    tf.function(model.train_step, autograph=False).get_concrete_function(
        (tf.constant(x[:BATCH]), tf.constant(Y[:BATCH]))
    )
    assert isinstance(applied[0][0], tf.IndexedSlices)
    assert not any(isinstance(g, tf.IndexedSlices) for g, _ in applied[1:])


def difference(found, expected):
    pairs = zip(
        keras.tree.flatten(found), keras.tree.flatten(expected), strict=True
    )
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs)


def run(name, names):
    make, x, optimizer, options = {**CASES, **WITH_REPLICAS}[name]
    plain, expected = trained(lambda: keras.Sequential(make()), x, optimizer)
    arguments = {"num_micro_batches": 2, **options}
    scope = contextlib.nullcontext()
    if name in WITH_REPLICAS:
        scope = tfgpipe.PipelineStrategy(2, 2, names).scope()
    else:
        devices = [names[i] for i in options.get("devices", [0, 1])]
        arguments |= {"devices": devices, "num_partitions": len(devices)}

    def pipeline():
        with scope:
            return tfgpipe.GPipe(make(), **arguments)

    model, found = trained(pipeline, x, optimizer)
    devices = sorted({w.value.device for w in model.weights})
    if name == "table on the host":
        check_table(model, x)
    if name == "saved":  # and goes on in another number of cells
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            model = tfgpipe.load_model(path, 1, devices=names[:1])
        found, expected = fitted(model, x), fitted(plain, x)
    size = difference(found, expected)
    print(json.dumps([name, size, devices]), flush=True)


SERVER = """
import tensorflow as tf
server = tf.distribute.Server.create_local_server()
print(server.target, flush=True)
server.join()
"""


@contextlib.contextmanager
def workers(count):
    """Names of the XLA_CPUs of so many other processes."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    try:
        targets = [worker.stdout.readline().strip() for worker in running]
        hosts = [target.removeprefix("grpc://") for target in targets]
        spec = tf.train.ClusterSpec({"worker": hosts})
        tf.config.experimental_connect_to_cluster(spec)
        yield [
            f"/job:worker/replica:0/task:{i}/device:XLA_CPU:0"
            for i in range(count)
        ]
    finally:
        for worker in running:
            worker.kill()


if __name__ == "__main__":
    in_workers = "--workers" in sys.argv
    cases = [name for name in sys.argv[1:] if name != "--workers"]
    with workers(4) if in_workers else contextlib.nullcontext(DEVICES) as names:
        for name in cases or (IN_WORKERS if in_workers else CASES):
            run(name, names)
