"""`GPipe`: a list of Keras layers as a model that spans several devices.

`gpipe` has the class; what it does with a mini-batch is in `step`.
"""

from tfgpipe.model.gpipe import GPipe
from tfgpipe.model.groups import print_cells
from tfgpipe.model.nonfinite import all_finite, examine
from tfgpipe.model.rehearsal import HOST
from tfgpipe.model.saving import load_model
