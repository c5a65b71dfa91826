"""What the user gives, checked: arguments, layers, data."""

from tfgpipe.sequence import inputs
from tfgpipe.sequence.arguments import Arguments
from tfgpipe.sequence.inference import infer

__all__ = ["Arguments", "infer", "inputs"]
