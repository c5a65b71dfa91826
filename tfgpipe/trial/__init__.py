"""Tries layers on a few rows, before a pipeline trains with them.

Whether a layer treats a batch as it treats its parts cannot be read from what
it is made of; it can be tried. `trial.py` goes through the layers of a model,
`rows.py` has the rows, `outcome.py` what a layer makes of them, `compare.py`
what differs, `lookups.py` which slices of a sparse gradient belong to rows, and
`known.py` the layers of Keras for which all of this is known.
"""

from tfgpipe.trial.known import MIXES_ROWS, ROW_BY_ROW
from tfgpipe.trial.trial import TRIALS, Trial

__all__ = ["MIXES_ROWS", "ROW_BY_ROW", "TRIALS", "Trial"]
