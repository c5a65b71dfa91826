"""Trains a ResNet of `keras.applications` through two cells.

On images of a bright square in one of four quarters. For trained weights:
`ResNet50(weights="imagenet", include_top=False)`, and a layer of one's own.

    python examples/resnet.py
"""

import keras
import numpy as np
import tensorflow as tf

import tfgpipe

if len(tf.config.list_physical_devices("GPU")) < 2:  # two halves of the CPU
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
keras.utils.set_random_seed(0)

rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 32)
images = rng.random((32, 32, 32, 3), np.float32) / 4
for image, label in zip(images, labels):
    row, column = 16 * (label // 2), 16 * (label % 2)
    image[row + 4 : row + 12, column + 4 : column + 12] += 0.75

model = keras.applications.ResNet50V2(
    weights=None,
    input_shape=(32, 32, 3),
    classes=4,
    pooling="avg",
)
pipeline = tfgpipe.GPipe(
    model,
    num_partitions=2,
    num_micro_batches=2,  # of 8 images, which are normalised together
)
for cell in pipeline.cells():
    names = cell.layers
    print(
        f"cell {cell.index} on {cell.device}: {len(names)} layers, from "
        f"{names[0]} to {names[-1]}, {cell.num_params:,} parameters"
    )
pipeline.compile(
    keras.optimizers.SGD(0.02, momentum=0.9),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = pipeline.fit(images, labels, batch_size=16, epochs=4, verbose=2)
losses = history.history["loss"]
print(f"Loss: {losses[0]:.2f}, then {losses[-1]:.2f}")
