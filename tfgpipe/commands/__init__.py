"""The program `tfgpipe`, and what programs have in common.

`main` has the sub-commands, each in a module of its name. `subcommands` and
`command_line` parse flags, say what is wrong, and return exit codes; `progress`
says what a program does in a long silence. Those of tools/ use them, too.
"""

from tfgpipe.commands import command_line, main, progress, subcommands

__all__ = ["command_line", "main", "progress", "subcommands"]
