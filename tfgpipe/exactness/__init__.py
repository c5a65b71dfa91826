"""Exactness: one step of a user's model beside plain Keras on the host.

`check` runs it, and compares the loss and what `fit` runs. `layers.py` has what
each layer took and gave on its device in a step by layers, and compares it with
the host; `trial/` compares its micro-batches with all rows at once. What
differs is in the `Report`.
"""

from tfgpipe.exactness.check import check
from tfgpipe.exactness.report import Report

__all__ = [
    "Report",
    "check",
]
