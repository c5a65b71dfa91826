"""A step of `fit` with a clock."""

import keras
import numpy as np
import tensorflow as tf
from tiny import compiled, data, pipeline

from tfgpipe.monitor import TimedStep


def iterator(rows, batch=4):
    return iter(tf.data.Dataset.from_tensor_slices(data(rows)).batch(batch))


def test_step_takes_the_place_of_one_call_and_measures_when_it_is_warm():
    model = compiled(pipeline())
    model.make_train_function()
    own = model.train_function
    step = TimedStep(model)
    assert model.train_function is own
    batches = iterator(12)
    for call in range(3):
        step.install()
        assert model.train_function is step
        logs = model.train_function(batches)
        assert model.train_function is own
        assert set(logs) == {"loss"}
        assert (step.measured is None) == (call == 0)  # which has traced
    assert model.optimizer.iterations == 3
    assert step.measured.num_rows == 4
    spec = step.measured.input_spec
    assert isinstance(spec, keras.KerasTensor) and spec.shape == (None, 4)
    assert min(event.start for event in step.measured.events) == 0


def test_each_kind_of_mini_batch_is_traced_before_it_is_measured():
    model = compiled(pipeline(m=2))
    model.make_train_function()
    step = TimedStep(model)
    rows = []
    for batch in (4, 3, 4, 3):
        x, y = data(batch)
        batches = tf.data.Dataset.from_tensors((x, y))
        step.install()
        model.train_function(iter(batches))
        rows.append(step.measured and step.measured.num_rows)
        if step.measured:
            assert len(step.measured.events) > 2 * batch
    # the second is of any size
    assert rows == [None, None, 4, 3]


def test_installed_step_is_withdrawn():
    model = compiled(pipeline())
    model.make_train_function()
    own = model.train_function
    step = TimedStep(model)
    step.install()
    step.withdraw()
    step.withdraw()
    assert model.train_function is own
    np.testing.assert_array_equal(model.optimizer.iterations, 0)
