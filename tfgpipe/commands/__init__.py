"""The sub-commands of `tfgpipe`, each a module, and what programs have alike.

Programs of tools/ use `command_line`, too.
"""

from tfgpipe.commands import command_line

__all__ = ["command_line"]
