"""A diffusion model learns to take noise out of pictures, and draws some."""

import keras
import numpy as np
import tensorflow as tf
from journey import assert_journey
from keras import layers as kl

import tfgpipe

SIZE = 8


def denoiser():
    """A U-Net that is told how much noise there is."""
    noisy = keras.Input((SIZE, SIZE, 1), name="noisy")
    variance = keras.Input((1, 1, 1), name="variance")
    told = kl.UpSampling2D(SIZE, interpolation="nearest")(variance)
    skip = kl.Conv2D(4, 1)(kl.Concatenate()([noisy, told]))
    h = kl.AveragePooling2D(2)(skip)
    h = kl.LayerNormalization()(kl.Conv2D(8, 3, padding="same")(h))
    h = keras.activations.silu(h)
    h = kl.Add()([h, kl.Conv2D(8, 3, padding="same")(h)])
    h = kl.UpSampling2D(2, interpolation="bilinear")(h)
    h = kl.Concatenate()([h, skip])
    return keras.Model([noisy, variance], kl.Conv2D(1, 1)(h))


def diffusion(base):
    """The class of keras.io's example, on plain Keras or on a pipeline."""

    @keras.saving.register_keras_serializable(f"journeys_{base.__name__}")
    class Diffusion(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.normalizer = kl.Normalization()
            self.normalizer.build((None, SIZE, SIZE, 1))  # before it is loaded
            self.seeds = keras.random.SeedGenerator(3)

        def noised(self, data):
            """Inputs and labels of pictures."""
            pictures, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            pictures = self.normalizer(pictures)
            noises = keras.random.normal(
                keras.ops.shape(pictures), seed=self.seeds
            )
            angles = keras.random.uniform(
                (keras.ops.shape(pictures)[0], 1, 1, 1), seed=self.seeds
            )
            signal, noise = keras.ops.cos(angles), keras.ops.sin(angles)
            return [signal * pictures + noise * noises, noise**2], noises

        def train_step(self, data):
            return super().train_step(self.noised(data))

        def test_step(self, data):
            return super().test_step(self.noised(data))

    return Diffusion


def drawn(model, steps=4):
    """Pictures of noise, denoised step by step."""
    noisy = np.random.default_rng(1).normal(size=(3, SIZE, SIZE, 1))
    for angle in np.linspace(1.4, 0.2, steps):
        variance = np.full((3, 1, 1, 1), np.sin(angle) ** 2)
        noise = model.predict([noisy, variance], verbose=0)
        picture = (noisy - np.sin(angle) * noise) / np.cos(angle)
        lower = angle - 0.2
        noisy = np.cos(lower) * picture + np.sin(lower) * noise
    return noisy


def test_diffusion_model_learns_and_draws(tmp_path):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    pictures = np.random.default_rng(0).random((40, SIZE, SIZE, 1))
    data = tf.data.Dataset.from_tensor_slices(pictures).batch(16)

    # Plain Keras takes inputs and outputs, a pipeline takes the model.
    keras.utils.set_random_seed(1)
    net = denoiser()
    plain = diffusion(keras.Model)(net.inputs, net.outputs[0])
    keras.utils.set_random_seed(1)
    pipeline = diffusion(tfgpipe.GPipe)(
        denoiser(), num_partitions=2, num_micro_batches=4
    )
    for model in (plain, pipeline):
        model.normalizer.adapt(pictures)
        model.compile(
            keras.optimizers.AdamW(
                0.01, use_ema=True, ema_momentum=0.9, weight_decay=1e-3
            ),
            loss=keras.losses.MeanAbsoluteError(),
        )
        model.fit(
            data, validation_data=data, epochs=2, shuffle=False, verbose=0
        )
    assert_journey(
        tmp_path,
        plain,
        pipeline,
        {"x": data},
        data,
        drawn,
        [tf.constant(pictures[:2]), tf.ones((2, 1, 1, 1), "float64")],
    )
