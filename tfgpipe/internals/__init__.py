"""Every private TensorFlow and Keras name that tfgpipe uses.

Nothing else in the library may reach below the public interfaces. This is the
one package that exports all of its names.
"""

from tfgpipe.internals.keras import *
from tfgpipe.internals.tensorflow import *
