"""Trains what the page of results shows: `python -m tools.results SUB-COMMAND`.

A sub-command is the module of its name: `image`, `transfer`, `lm`,
`translation` and `batch_size`. `runs` trains for them, each run once; an
`outcome` is what they return, and `plots` draws it.
"""
