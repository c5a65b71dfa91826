"""Trains an experiment of `params`: `python -m tools.train`.

The `trainer` is for other programs, too; its folder is read by `trained_run`.
`comparison` compares two runs. The `command` has `flags`, which ask for an
experiment and its `placement`, and `ends` with a code of a table.
"""
