"""Programs around the library, run from a checkout.

The variables set here must be set before TensorFlow is imported.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no start-up messages
