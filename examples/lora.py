"""Trains LoRA adapters of a language model of KerasHub through two cells.

Llama of a tiny size with weights that are random; it learns to count. For a
trained one: `tfgpipe.load_preset`, as in `large_preset.py`.

    pip install keras-hub
    python examples/lora.py
"""

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfgpipe

if len(tf.config.list_physical_devices("GPU")) < 2:  # two halves of the CPU
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
keras.utils.set_random_seed(0)

backbone = keras_hub.models.LlamaBackbone(
    vocabulary_size=16,
    num_layers=4,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=32,
    intermediate_dim=64,
)
backbone.enable_lora(4)
logits = backbone.token_embedding(backbone.output, reverse=True)
model = keras.Model(backbone.input, logits)
before = {w.path: w.numpy() for w in model.weights}

pipeline = tfgpipe.GPipe(model, num_partitions=2, num_micro_batches=4)
for cell in pipeline.cells():
    print(cell)
pipeline.compile(
    keras.optimizers.Adam(0.05),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
starts = np.random.default_rng(0).integers(0, 16, (256, 1))
tokens = (starts + np.arange(9)) % 16  # 14, 15, 0, 1, ...
x = {
    "token_ids": tokens[:, :-1],
    "padding_mask": np.ones((256, 8), bool),
}
losses = pipeline.fit(x, tokens[:, 1:], 32, epochs=10, verbose=2).history[
    "loss"
]

changed = {w.path for w in model.weights if (w.numpy() != before[w.path]).any()}
assert changed and all("lora" in path for path in changed), changed
trained = sum(np.size(before[path]) for path in changed)
print(f"Trained {trained:,} of {model.count_params():,} parameters: adapters.")
print(f"Loss: {losses[0]:.2f}, then {losses[-1]:.2f}")
