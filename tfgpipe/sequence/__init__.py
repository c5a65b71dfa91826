"""What the user gives, checked: arguments, layers, data."""

from tfgpipe.sequence import inputs
from tfgpipe.sequence.arguments import Arguments
from tfgpipe.sequence.source import items_from_config, layers_of, source_of

__all__ = ["Arguments", "inputs", "items_from_config", "layers_of", "source_of"]
