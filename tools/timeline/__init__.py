"""Draws when each task of a step runs: `python -m tools.timeline`.

`runs` makes the events of a step, `statistics` its numbers, `text` its letters
and Chrome trace, `gantt` its pictures in the colours of `gantt_colors`.
"""
