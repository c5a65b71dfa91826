"""A language model of KerasHub learns from texts, and writes some."""

import keras
import pytest
import tensorflow as tf
from tiny import assert_close, exported, weights

import tfgpipe

models = pytest.importorskip("keras_hub").models
tiny_presets = pytest.importorskip("tiny_presets")

TEXTS = ["a b c d", "b c d", "c d e f g", "d e", "e f g h", "f g h i"]
PROMPTS = ["a b", "c", "d e f"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_language_model_of_a_preset_learns_and_writes(tmp_path):
    keras.config.set_floatx("float64")
    preset = str(tmp_path / "preset")
    tiny_presets.gpt2().save_to_preset(preset)

    plain = models.CausalLM.from_preset(preset, dtype="float64")
    pipeline = tfgpipe.load_preset(
        "CausalLM",
        preset,
        num_partitions=2,
        num_micro_batches=2,
        dtype="float64",
    )
    for model in (plain, pipeline):
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            sampler="greedy",
        )
    assert pipeline.generate(PROMPTS) == plain.generate(PROMPTS)

    # Train all of it.
    for model in (plain, pipeline):
        model.fit(TEXTS, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_close(pipeline.history.history, plain.history.history)
    assert_close(weights(pipeline), weights(plain))
    assert_close(
        pipeline.evaluate(TEXTS, verbose=0), plain.evaluate(TEXTS, verbose=0)
    )
    texts = plain.generate(PROMPTS)
    assert pipeline.generate(PROMPTS) == texts

    # Save it, and load it with other numbers of cells.
    path = str(tmp_path / "writer.keras")
    pipeline.save(path)
    loaded = tfgpipe.load_model(path, num_partitions=3)
    loaded.compile(sampler="greedy")
    assert loaded.generate(PROMPTS) == texts

    # Export it: what is served takes tokens.
    tokens, _, _ = plain.preprocessor(TEXTS)
    tokens = {name: tf.cast(ids, "int32") for name, ids in tokens.items()}
    served = exported(tmp_path, plain, pipeline)
    assert_close(served[1].serve(tokens), served[0].serve(tokens))

    # Leave: a preset of KerasHub, and a file of plain Keras.
    pipeline.save_to_preset(str(tmp_path / "trained"))
    pipeline.model.save(str(tmp_path / "plain.keras"))
    from_preset = models.CausalLM.from_preset(str(tmp_path / "trained"))
    with pytest.warns(UserWarning, match="was not called"):  # KerasHub's
        from_file = keras.saving.load_model(str(tmp_path / "plain.keras"))
    for again in (from_preset, from_file):
        again.compile(sampler="greedy")
        assert again.generate(PROMPTS) == texts
