"""Draws when each task of a step runs: `python -m tools.timeline`.

`runs` makes the events of a step. Numbers and pictures are those of
`tfgpipe.monitor`.
"""
