"""Draws when each task of a step runs: `python -m tools.timeline`.

`runs` makes the events of a step, `text` its letters and Chrome trace. Its
numbers and its pictures are those of `tfgpipe.monitor`.
"""
