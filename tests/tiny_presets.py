"""Tiny tasks of KerasHub, and what they take."""

import keras
import numpy as np
from keras_hub import models

TEXT = {
    "vocabulary_size": 60,
    "num_layers": 4,
    "hidden_dim": 16,
    "intermediate_dim": 16,
}
GROUPED = {"num_query_heads": 2, "num_key_value_heads": 1}


def llama(seed=0):
    """Without a preprocessor, and with weights that are not as made."""
    keras.utils.set_random_seed(seed)
    backbone = models.LlamaBackbone(**TEXT, **GROUPED)
    return livelier(models.LlamaCausalLM(backbone, preprocessor=None))


def livelier(task):
    """With weights far enough from their start that tokens differ."""
    rng = np.random.default_rng(1)
    for weight in task.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            noise = rng.normal(0, 0.3, weight.shape)
            weight.assign(weight.numpy() + noise.astype(weight.dtype))
    return task
