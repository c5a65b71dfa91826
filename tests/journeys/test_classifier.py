"""A text classifier of KerasHub gets other classes, and is served."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiny import assert_close, assert_same, exported, weights

import tfgpipe

models = pytest.importorskip("keras_hub").models
tiny_presets = pytest.importorskip("tiny_presets")

TEXTS = ["a b c", "b b d e", "c a", "e d c b a", "f a b", "g h", "h g f", "a a"]
LABELS = np.array([0, 1, 2, 3, 0, 1, 2, 3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_classifier_of_a_preset_becomes_one_of_other_classes(tmp_path):
    keras.config.set_floatx("float64")
    preset = str(tmp_path / "preset")
    tiny_presets.bert().save_to_preset(preset)

    # Load it, with a head of four classes instead of three.
    keras.utils.set_random_seed(1)
    plain = models.TextClassifier.from_preset(
        preset, num_classes=4, dtype="float64"
    )
    keras.utils.set_random_seed(1)
    pipeline = tfgpipe.load_preset(
        "TextClassifier",
        preset,
        num_partitions=2,
        num_micro_batches=2,
        num_classes=4,
        dtype="float64",
    )
    assert_same(weights(pipeline), weights(plain))

    # Train it as KerasHub has compiled it, on texts.
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
    for model in (plain, pipeline):
        model.fit(TEXTS, LABELS, epochs=2, **fit)
    assert_close(pipeline.history.history, plain.history.history)
    assert_close(weights(pipeline), weights(plain))

    assert_close(
        pipeline.evaluate(TEXTS, LABELS, batch_size=4, verbose=0),
        plain.evaluate(TEXTS, LABELS, batch_size=4, verbose=0),
    )
    expected = plain.predict(TEXTS, verbose=0)
    assert_close(pipeline.predict(TEXTS, verbose=0), expected)

    # Save it, load it with other numbers of cells, and go on.
    path = str(tmp_path / "classifier.keras")
    pipeline.save(path)
    plain.fit(TEXTS, LABELS, **fit)
    loaded = tfgpipe.load_model(path, num_partitions=3)
    assert len(loaded.cells()) == 3
    assert_close(loaded.predict(TEXTS, verbose=0), expected)
    loaded.fit(TEXTS, LABELS, **fit)
    assert_close(weights(loaded), weights(plain))

    # Export it, and serve tokens.
    tokens = plain.preprocessor(TEXTS)
    tokens = {name: tf.cast(ids, "int32") for name, ids in tokens.items()}
    served = exported(tmp_path, plain, loaded)
    assert_close(served[1].serve(tokens), served[0].serve(tokens))

    # Leave: a preset of KerasHub, and a file of plain Keras.
    expected = plain.predict(TEXTS, verbose=0)
    loaded.save_to_preset(str(tmp_path / "trained"))
    again = models.TextClassifier.from_preset(
        str(tmp_path / "trained"), dtype="float64"
    )
    assert_close(again.predict(TEXTS, verbose=0), expected)
    loaded.model.save(str(tmp_path / "plain.keras"))
    with pytest.warns(UserWarning, match="was not called"):  # KerasHub's
        again = keras.saving.load_model(str(tmp_path / "plain.keras"))
    assert type(again) is type(plain)
    assert_close(again.predict(TEXTS, verbose=0), expected)
