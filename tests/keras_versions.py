"""What the older versions of Keras do in another way, for tests to expect."""

import keras

from tfgpipe.versions import first_two

VERSION = first_two(keras.__version__)
# They know no names of outputs in a dict, but of losses.
NAMES_METRICS_OF_DICTS = VERSION >= (3, 12)
# They divide the loss of masked outputs by the number of values plus 1e-7.
MASKED_LOSS_RTOL = 1e-10 if VERSION >= (3, 13) else 1e-7
# Optimizers that they do not have, or that read what a tf.Variable lacks.
WITHOUT = {
    name
    for name, since in {
        "Muon": (3, 13),
        "ScheduleFreeAdamW": (3, 14),
        "MultiOptimizer": (3, 15),
    }.items()
    if since > VERSION
}
# They bring the weights of a functional model into the order of its calls.
KEEPS_ORDER_OF_WEIGHTS = VERSION >= (3, 15)
