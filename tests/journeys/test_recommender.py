"""A recommender: ids and features in a dict, two towers, two outputs."""

import keras
import numpy as np
import tensorflow as tf
from journey import assert_journey
from keras import layers as kl

import tfgpipe

USERS, FILMS = 20, 30


def recommender():
    """Predicts whether a user watches a film, and how it is rated."""
    user = keras.Input((), dtype="int32", name="user")
    film = keras.Input((), dtype="int32", name="film")
    genres = keras.Input((4,), name="genres")
    u = kl.Embedding(USERS, 8, name="users")(user)
    f = kl.Embedding(FILMS, 8, name="films")(film)
    u = kl.Dense(8, "relu")(u)
    f = kl.Dense(8, "relu")(kl.Concatenate()([f, genres]))
    both = kl.Concatenate()([u, f, keras.ops.multiply(u, f)])
    both = kl.Dense(16, "relu")(both)
    watched = kl.Dense(1, activation="sigmoid", name="watched")(both)
    rating = kl.Dense(1, name="rating")(both)
    return keras.Model(
        {"user": user, "film": film, "genres": genres},
        {"watched": watched, "rating": rating},
    )


def test_recommender_is_trained_and_served(tmp_path):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    rng = np.random.default_rng(0)
    x = {
        "user": rng.integers(0, USERS, 50),
        "film": rng.integers(0, FILMS, 50),
        "genres": rng.random((50, 4)),
    }
    y = {
        "watched": rng.integers(0, 2, (50, 1)),
        "rating": rng.normal(size=(50, 1)),
    }
    weight = {"watched": np.ones(50), "rating": y["watched"][:, 0]}
    data = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(16)

    keras.utils.set_random_seed(1)
    plain = recommender()
    keras.utils.set_random_seed(1)
    pipeline = tfgpipe.GPipe(
        recommender(), num_partitions=2, num_micro_batches=4
    )
    for model in (plain, pipeline):
        # A rate by `pow` differs by 1e-9 in Keras, with TensorFlow's graph
        # optimiser and without; the functions of cells are without.
        model.compile(
            keras.optimizers.Adagrad(0.05, clipnorm=1.0),
            {"watched": "binary_crossentropy", "rating": "mse"},
            loss_weights={"watched": 1.0, "rating": 0.5},
            metrics={"watched": [keras.metrics.AUC(name="auc")]},
            weighted_metrics={"rating": ["mae"]},
        )

    for model in (plain, pipeline):
        model.fit(
            data,
            validation_data=data.take(2),
            epochs=3,
            callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=2)],
            shuffle=False,
            verbose=0,
        )
    served = {
        "user": tf.constant([3, 5]),
        "film": tf.constant([8, 9]),
        "genres": tf.constant(x["genres"][:2]),
    }
    assert_journey(
        tmp_path,
        plain,
        pipeline,
        {"x": data},
        data,
        lambda model: model.predict(x, verbose=0),
        served,
    )
