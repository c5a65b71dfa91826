import keras
import numpy as np
from keras import layers as kl

import tfgpipe
from tfgpipe.checkpoints import writer


def layers():
    return [
        keras.Input((4,)),
        kl.Dense(4, name="a"),
        kl.BatchNormalization(name="b"),
        kl.Dropout(0.5, seed=1, name="c"),
        keras.Sequential([kl.Dense(4), kl.Dropout(0.5)], name="d"),
        kl.Dense(2, name="e"),
    ]


def described(model):
    model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    model.train_on_batch(np.ones((4, 4)), np.ones((4, 2)))
    found = writer.variable_records(writer.contents(model))
    for group, own in found.items():  # slots begin with the model's name
        names = [name.rsplit("/", 1)[-1] for name, *_ in own]
        kinds = [kind for _, *kind in own]
        found[group] = kinds if group == "optimizer" else [*zip(names, kinds)]
    return found


def test_variables_are_those_of_plain_keras_whatever_the_cells():
    expected = described(keras.Sequential(layers()))
    assert [v[0] for v in expected["model"]].count("seed_generator_state") == 2
    assert len(expected["optimizer"]) > 10
    for k in (1, 3):
        assert described(tfgpipe.GPipe(layers(), k, 2)) == expected


def test_model_that_skips_has_a_count():
    model = tfgpipe.GPipe(layers(), 2, skip_nonfinite=True)
    assert described(model)["skipped"] == [("Variable:0", [[], "int64"])]
