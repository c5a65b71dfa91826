"""Fine-tunes a text classifier of KerasHub through two cells.

BERT of a tiny size with weights that are random, on reviews of three words. For
a trained one: `BertTextClassifier.from_preset(name, num_classes=2)`.

    pip install keras-hub
    python examples/finetune_classifier.py
"""

import itertools

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

WORDS = ["the", "film", "music", "was", "is", "good", "great", "bad", "dull"]
texts = [" ".join(t) for t in itertools.product(WORDS[1:3], WORDS[3:5], WORDS)]
labels = np.array([text.endswith(("good", "great")) for text in texts], int)

tokenizer = keras_hub.models.BertTokenizer(
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
)
preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
    tokenizer, sequence_length=8
)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=tokenizer.vocabulary_size(),
    num_layers=4,
    num_heads=2,
    hidden_dim=32,
    intermediate_dim=64,
    max_sequence_length=8,
)
task = keras_hub.models.BertTextClassifier(
    backbone, num_classes=2, preprocessor=preprocessor
)

pipeline = tfgpipe.GPipe(task, num_partitions=2, num_micro_batches=4)
for cell in pipeline.cells():
    print(cell)
pipeline.compile(
    keras.optimizers.Adam(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
data = tf.data.Dataset.from_tensor_slices((texts, labels)).shuffle(36, seed=0)
pipeline.fit(data.batch(12), epochs=16, verbose=2)

found = task.predict(texts, verbose=0).argmax(axis=-1)
print(f"Accuracy of the task itself: {(found == labels).mean():.0%}")
