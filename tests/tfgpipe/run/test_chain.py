"""Tasks of a device run one after the other; nothing else orders them."""

import tensorflow as tf
from crossing import short

from tfgpipe.run.chain import Chain, run_independently
from tfgpipe.schedules import Task

A, B = "CPU:0", "CPU:1"


def add_one(x):
    return tf.function(lambda x: x + 1, autograph=False)(x)


def ran(chain, device, x, micro_batch):
    task = Task("forward", 0, micro_batch)
    return chain.run(task, device, [], lambda: add_one(x))


def test_task_follows_the_last_one_of_its_device_alone():
    with tf.Graph().as_default():
        x, chain = tf.constant(1.0), Chain(None)
        first, other, second = (
            ran(chain, device, x, i) for i, device in enumerate((A, B, A))
        )
        assert second.op.control_inputs == [first.op]
        assert other.op.control_inputs == []
        assert chain.last_op == {A: second.op, B: other.op}
        assert short(other.op.device) == "/device:CPU:1"


def test_side_effects_do_not_order_devices():
    """TensorFlow would run what prints in the order of the tracing."""

    @tf.function
    def printing(x):
        tf.print("seen", output_stream="file:///dev/null")
        return x + 1

    @tf.function(autograph=False)
    def step(x):
        chain = Chain(None)
        for i, device in enumerate((A, B)):
            task = Task("forward", i, 0)
            found.append(chain.run(task, device, [], lambda: printing(x)).op)
        return x

    found = []
    step.get_concrete_function(tf.constant(1.0))
    assert [op.control_inputs for op in found] == [[], []]


def test_nothing_is_awaited_of_what_has_no_results():
    assert run_independently([]) is None
