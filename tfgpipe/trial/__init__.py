"""Tries layers on a few rows, before a pipeline trains with them.

Whether a layer treats a batch as it treats its parts cannot be read from what
it is made of; it can be tried. `trial.py` goes through the layers of a model,
`rows.py` has the rows, `outcome.py` what a layer makes of them, `compare.py`
what differs.
"""

from tfgpipe.trial.trial import MIXES_ROWS, ROW_BY_ROW, TRIALS, Trial

__all__ = [
    "MIXES_ROWS",
    "ROW_BY_ROW",
    "TRIALS",
    "Trial",
]
