"""A text classifier of KerasHub gets other classes, and is served."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from journey import assert_journey
from tiny import assert_close, assert_same, weights

import tfgpipe

models = pytest.importorskip("keras_hub").models
tiny_presets = pytest.importorskip("tiny_presets")

TEXTS = ["a b c", "b b d e", "c a", "e d c b a", "f a b", "g h", "h g f", "a a"]
LABELS = np.array([0, 1, 2, 3, 0, 1, 2, 3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.filterwarnings("ignore:.*was not called")  # KerasHub's
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
    fit = {"x": TEXTS, "y": LABELS, "batch_size": 4}
    for model in (plain, pipeline):
        model.fit(epochs=2, shuffle=False, verbose=0, **fit)
    tokens = plain.preprocessor(TEXTS)
    loaded = assert_journey(
        tmp_path,
        plain,
        pipeline,
        fit,
        (TEXTS, LABELS),
        lambda model: model.predict(TEXTS, verbose=0),
        {name: tf.cast(ids, "int32") for name, ids in tokens.items()},
    )

    # Leave: a preset of KerasHub.
    loaded.save_to_preset(str(tmp_path / "trained"))
    again = models.TextClassifier.from_preset(
        str(tmp_path / "trained"), dtype="float64"
    )
    expected = plain.predict(TEXTS, verbose=0)
    assert_close(again.predict(TEXTS, verbose=0), expected)
