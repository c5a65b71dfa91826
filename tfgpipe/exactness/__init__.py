"""Exactness: one step of a user's model beside plain Keras on the host.

`check` runs it layer by layer, on its devices and on the host, beside Keras and
what `fit` runs; `trial/` compares its micro-batches with all rows at once. What
differs is in the `Report`.
"""

from tfgpipe.exactness.check import check
from tfgpipe.exactness.report import Report

__all__ = [
    "Report",
    "check",
]
