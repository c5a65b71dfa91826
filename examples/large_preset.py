"""Loads a preset that no device has to hold, trains adapters, generates, saves.

Without a folder it writes a tiny GPT-2 first, with weights that are random; it
learns to continue the alphabet.

    pip install keras-hub
    python examples/large_preset.py [FOLDER]
"""

import sys
import tempfile

import keras
import tensorflow as tf
from keras_hub import models

import tfgpipe

if len(tf.config.list_physical_devices("GPU")) < 2:  # two halves of the CPU
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
keras.utils.set_random_seed(0)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tiny_preset():
    tokens = [*LETTERS, "ab", "<|endoftext|>"]
    tokenizer = models.GPT2Tokenizer(
        {token: i for i, token in enumerate(tokens)}, ["a b"]
    )
    backbone = models.GPT2Backbone(len(tokens), 4, 4, 32, 64, 0.0, 16)
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, 12)
    folder = tempfile.mkdtemp()
    models.GPT2CausalLM(backbone, preprocessor).save_to_preset(folder)
    return folder


preset = sys.argv[1] if len(sys.argv) > 1 else tiny_preset()
pipeline = tfgpipe.load_preset("CausalLM", preset, 2, 4)
for cell in pipeline.cells():
    print(cell)
pipeline.model.backbone.enable_lora(8)
pipeline.compile(keras.optimizers.Adam(0.03), sampler="greedy")
texts = [LETTERS[i : i + 8] for i in range(2, 18)] * 16
losses = pipeline.fit(texts, batch_size=16, epochs=6, verbose=2).history["loss"]
print(pipeline.generate(["cd", "hij"], max_length=8))
pipeline.save_to_preset(folder := tempfile.mkdtemp())
again = tfgpipe.load_preset("CausalLM", folder, 2)
again.compile(sampler="greedy")
assert again.generate("cd", 8) == pipeline.generate("cd", 8)
print(f"Loss: {losses[0]:.2f}, then {losses[-1]:.2f}")
