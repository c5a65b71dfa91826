"""Tasks that are measured are run, though nothing uses their results."""

import tensorflow as tf

from tfgpipe.profiles.lone_layer import AsWritten


def test_what_only_controls_others_is_run():
    calls = []

    def work(x):
        calls.append(x)
        return x

    def chain(x):
        for _ in range(3):
            task = tf.numpy_function(work, [x], tf.float32, stateful=False)
            with tf.control_dependencies([task]):
                time = tf.timestamp()
        return [time]

    function = AsWritten(chain)
    for _ in range(2):
        function(tf.ones((2,)))
    assert len(calls) == 6
