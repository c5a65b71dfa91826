"""A small student learns from a large teacher."""

import keras
import numpy as np
import tensorflow as tf
from journey import assert_journey
from keras import layers as kl

import tfgpipe


def distiller(base):
    """The class of keras.io's example, on plain Keras or on a pipeline."""

    @keras.saving.register_keras_serializable(f"journeys_{base.__name__}")
    class Distiller(base):
        def __init__(self, *args, teacher=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = teacher
            self.divergence = keras.metrics.Mean(name="divergence")

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            taught = keras.ops.softmax(self.teacher(x, training=False) / 3)
            own = keras.ops.softmax(y_pred / 3)
            apart = keras.ops.mean(keras.losses.kl_divergence(taught, own))
            self.divergence.update_state(apart)
            return 0.1 * loss + 0.9 * apart * 9

        def get_config(self):
            teacher = keras.saving.serialize_keras_object(self.teacher)
            return {**super().get_config(), "teacher": teacher}

        @classmethod
        def from_config(cls, config, custom_objects=None):
            teacher = config["teacher"]
            config["teacher"] = keras.saving.deserialize_keras_object(teacher)
            return super().from_config(config, custom_objects)

    return Distiller


def student():
    return [
        keras.Input((8, 8, 1)),
        kl.Conv2D(4, 3, strides=2, padding="same"),
        kl.LeakyReLU(negative_slope=0.2),
        kl.MaxPooling2D(2, strides=1, padding="same"),
        kl.Conv2D(8, 3, strides=2, padding="same"),
        kl.Flatten(),
        kl.Dense(5),
    ]


def in_a_row(layers):
    inputs = outputs = layers[0]
    for layer in layers[1:]:
        outputs = layer(outputs)
    return inputs, outputs


def test_student_learns_from_a_teacher(tmp_path):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    rng = np.random.default_rng(0)
    x = rng.random((48, 8, 8, 1))
    y = rng.integers(0, 5, 48)

    # The teacher is trained through the pipeline, and kept for plain Keras.
    teacher = tfgpipe.GPipe(
        [
            keras.Input((8, 8, 1)),
            kl.Conv2D(16, 3, activation="relu", padding="same"),
            kl.Conv2D(16, 3, activation="relu", padding="same"),
            kl.GlobalAveragePooling2D(),
            kl.Dense(5),
        ],
        num_partitions=2,
        num_micro_batches=4,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    teacher.fit(x, y, batch_size=16, verbose=0)
    teacher.model.save(str(tmp_path / "teacher.keras"))

    keras.utils.set_random_seed(1)
    inputs, outputs = in_a_row(student())
    plain = distiller(keras.Model)(
        inputs,
        outputs,
        teacher=keras.saving.load_model(str(tmp_path / "teacher.keras")),
    )
    keras.utils.set_random_seed(1)
    pipeline = distiller(tfgpipe.GPipe)(
        student(),
        num_partitions=2,
        num_micro_batches=4,
        teacher=keras.saving.load_model(str(tmp_path / "teacher.keras")),
    )
    for model in (plain, pipeline):
        model.teacher.trainable = False
        model.compile(
            keras.optimizers.Adam(0.01),
            loss,
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
        model.fit(
            x[:40],
            y[:40],
            batch_size=16,
            epochs=2,
            shuffle=False,
            validation_data=(x[40:], y[40:]),
            verbose=0,
        )
    # The student needs no teacher where it is served, and in plain Keras.
    assert_journey(
        tmp_path,
        plain,
        pipeline,
        {"x": x, "y": y, "batch_size": 16},
        (x, y),
        lambda model: model.predict(x, verbose=0),
        tf.constant(x),
    )
