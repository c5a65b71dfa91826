"""Trains what the page of results shows: `python -m tools.results SUB-COMMAND`.

A sub-command is the module of its name: `image`, `lm` and `translation`. `runs`
trains for them, each run once.
"""
