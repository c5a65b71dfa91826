"""The program `tfgpipe`, and what programs have in common.

`main` has the sub-commands, each in a module of its name; programs of tools/
use `command_line`, too.
"""

from tfgpipe.commands import command_line, main

__all__ = ["command_line", "main"]
