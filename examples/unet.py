"""Trains a U-Net, whose skips are long, through two cells.

It finds discs in noisy images. What a skip carries travels through the cells
between its ends.

    python examples/unet.py
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import tfgpipe

if len(tf.config.list_physical_devices("GPU")) < 2:  # two halves of the CPU
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
keras.utils.set_random_seed(0)


def convolutions(x, filters):
    for _ in range(2):
        x = kl.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x


def unet(size=32, filters=(8, 16, 32)):
    x = inputs = keras.Input((size, size, 1))
    skips = []
    for count in filters[:-1]:
        skips.append(convolutions(x, count))
        x = kl.MaxPooling2D()(skips[-1])
    x = convolutions(x, filters[-1])
    for count, skip in zip(filters[-2::-1], reversed(skips)):
        x = convolutions(kl.Concatenate()([kl.UpSampling2D()(x), skip]), count)
    return keras.Model(inputs, kl.Conv2D(1, 1, activation="sigmoid")(x))


rng = np.random.default_rng(0)
place = np.indices((32, 32))
centres, radii = rng.uniform(8, 24, (128, 2, 1, 1)), rng.uniform(5, 12, 128)
distances = np.sqrt(((place - centres) ** 2).sum(axis=1))
masks = (distances < radii[:, None, None])[..., None].astype("float32")
images = masks + rng.normal(0, 0.5, masks.shape).astype("float32")

model = unet()
pipeline = tfgpipe.GPipe(model, num_partitions=2, num_micro_batches=4)
for cell in pipeline.cells():
    print(cell)
pipeline.compile(
    keras.optimizers.Adam(0.01),
    "binary_crossentropy",
    metrics=[keras.metrics.BinaryIoU([1])],
)
pipeline.fit(images, masks, batch_size=16, epochs=10, verbose=2)
print(f"Overlap: {pipeline.evaluate(images, masks, verbose=0)[1]:.0%}")
