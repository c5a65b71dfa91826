"""When tasks run; of devices that hosts are ahead of, too."""

import functools

import pytest
import tensorflow as tf

from tfgpipe.run import Chain, Clock
from tfgpipe.run.clock import _seen
from tfgpipe.schedules import Task


def timed():
    """Two tasks on one device: when they start and end."""

    @tf.function(autograph=False)
    def step(x):
        clock = Clock()
        chain = Chain(clock)
        for m in range(2):
            task = Task("forward", 0, m)
            squared = functools.partial(tf.linalg.matmul, x, x)
            x = chain.run(task, "CPU:1", [x], squared)
        assert [task.micro_batch for task, _ in clock.tasks] == [0, 1]
        return tf.stack(clock.times)

    return step(tf.eye(64)).numpy()


def test_tasks_run_one_after_the_other():
    times = list(timed())
    assert times == sorted(times)


@pytest.mark.parametrize("dtype", ["float32", "variant"])
def test_device_that_is_behind_is_waited_for(dtype):
    """Also where it returns nothing that the host can have."""
    with tf.Graph().as_default() as graph, tf.device("GPU:0"):
        after = tf.compat.v1.placeholder(dtype, [3], name="after")
        (back,) = _seen("/device:GPU:0", "/device:CPU:0", [after.op])
    number = back.op.inputs[0].op
    waited = {
        op for op in graph.get_operations() if after.op in op.control_inputs
    }
    assert back.device == "/device:CPU:0" and number.device == "/device:GPU:0"
    assert waited and waited & {number, *(t.op for t in number.inputs)}


def test_what_is_on_the_host_is_not_waited_for():
    with tf.Graph().as_default(), tf.device("CPU:0"):
        after = tf.compat.v1.placeholder("float32", [3])
        assert _seen("/device:GPU:0", "/device:CPU:0", [after.op]) == []
