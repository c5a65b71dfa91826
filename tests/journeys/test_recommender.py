"""A recommender: ids and features in a dict, two towers, two outputs."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from tiny import assert_close, exported, weights

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
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.5)
        model.compile(
            keras.optimizers.Adagrad(rate, clipnorm=1.0),
            {"watched": "binary_crossentropy", "rating": "mse"},
            loss_weights={"watched": 1.0, "rating": 0.5},
            metrics={"watched": [keras.metrics.AUC(name="auc")]},
            weighted_metrics={"rating": ["mae"]},
        )

    # Train, keep the best.
    best = str(tmp_path / "best.keras")
    for model in (plain, pipeline):
        callbacks = [keras.callbacks.EarlyStopping("val_loss", patience=2)]
        if model is pipeline:
            callbacks += [keras.callbacks.ModelCheckpoint(best)]
        model.fit(
            data,
            validation_data=data.take(2),
            epochs=3,
            callbacks=callbacks,
            shuffle=False,
            verbose=0,
        )
    assert_close(pipeline.history.history, plain.history.history)
    assert_close(weights(pipeline), weights(plain))

    expected = plain.evaluate(data, return_dict=True, verbose=0)
    found = pipeline.evaluate(data, return_dict=True, verbose=0)
    assert_close(found, expected)

    expected = plain.predict(x, verbose=0)
    found = pipeline.predict(x, verbose=0)
    assert_close(found, expected)

    # Load it with other numbers of cells, and go on.
    plain.fit(data, shuffle=False, verbose=0)
    loaded = tfgpipe.load_model(best, num_partitions=3)
    assert len(loaded.cells()) == 3
    loaded.fit(data, shuffle=False, verbose=0)
    assert_close(weights(loaded), weights(plain))

    # Serve it.
    x = {
        "user": tf.constant([3, 5]),
        "film": tf.constant([8, 9]),
        "genres": tf.constant(x["genres"][:2]),
    }
    served = exported(tmp_path, plain, loaded)
    expected, found = (model.serve(x) for model in served)
    assert_close(found, expected)
    signatures = [model.signatures["serving_default"] for model in served]
    expected, found = (s.structured_input_signature for s in signatures)
    assert found == expected

    # Leave for plain Keras.
    loaded.model.save(str(tmp_path / "plain.keras"))
    again = keras.saving.load_model(str(tmp_path / "plain.keras"))
    assert_close(
        again.predict(x, verbose=0)["rating"],
        plain.predict(x, verbose=0)["rating"],
    )
