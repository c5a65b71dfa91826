"""Trains published models in a pipeline and in plain Keras: `tools.zoo`.

`applications` and `kerashub` say which, and how small; `trial` compares one, in
a process of its own; `table` writes what was found as a page.
"""
