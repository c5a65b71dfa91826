"""The way of a model: trained, saved, loaded with other cells, served, left.

At each stop a pipeline has the numbers of plain Keras.
"""

import keras
from tiny import assert_close, exported, weights

import tfgpipe


def assert_journey(folder, plain, pipeline, fit, evaluate, outputs, served):
    """Compares two models that were trained alike.

    `fit` and `evaluate` are arguments of these; `outputs` takes a model, and
    returns what it has learnt to do; `served` is what exported models take.
    """
    assert_close(pipeline.history.history, plain.history.history)
    assert_close(weights(pipeline), weights(plain))
    found, expected = (
        model.evaluate(*evaluate, batch_size=16, verbose=0)
        if isinstance(evaluate, tuple)
        else model.evaluate(evaluate, verbose=0)
        for model in (pipeline, plain)
    )
    assert_close(found, expected)
    expected = outputs(plain)
    assert_close(outputs(pipeline), expected)

    # Save it, load it with other numbers of cells, and go on.
    pipeline.save(folder / "model.keras")
    loaded = tfgpipe.load_model(folder / "model.keras", num_partitions=3)
    assert len(loaded.cells()) == 3
    assert_close(outputs(loaded), expected)
    for model in (plain, loaded):
        model.fit(**fit, shuffle=False, verbose=0)
    assert_close(weights(loaded), weights(plain))

    # Serve it.
    models = exported(folder, plain, loaded)
    expected, found = (model.serve(served) for model in models)
    assert_close(found, expected)

    # Leave: a file of plain Keras, without the class of the pipeline.
    loaded.model.save(folder / "plain.keras")
    again = keras.saving.load_model(folder / "plain.keras")
    assert not isinstance(again, tfgpipe.GPipe)
    assert_close(outputs(again), outputs(plain))
    return loaded
