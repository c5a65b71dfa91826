"""A backbone and a task of KerasHub train as in plain Keras."""

import keras
import keras_hub
import numpy as np
import pytest
from beside_keras import ROWS, check, normal

pytestmark = pytest.mark.usefixtures("float64")


def backbone():
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=20,
        num_layers=2,
        num_heads=2,
        hidden_dim=4,
        intermediate_dim=8,
        max_sequence_length=6,
        dropout=0.0,
    )


def task():
    model = keras_hub.models.GPT2CausalLM(backbone())
    model.preprocessor = None  # the data is tokens already
    return model


def tokens(seed):
    return np.random.default_rng(seed).integers(1, 20, (ROWS, 6))


def text():
    mask = np.arange(6) < np.arange(1, ROWS + 1)[:, None]
    return {"token_ids": tokens(0), "padding_mask": mask.astype("int32")}


def itself(model):
    return model


@pytest.mark.slow
def test_backbone_trains_as_in_keras():
    check(backbone, text(), normal(6, 4), [(2, 2)], reference=itself)


def test_causal_task_trains_as_in_keras():
    """Its class has methods of its own to compile, to fit and to quantize."""
    check(
        task,
        text(),
        tokens(1),
        [(2, 2)],
        reference=itself,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
