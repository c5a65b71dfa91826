"""What models and their devices need, without allocating any of it.

`model_size` counts; `parameter_counts` has what was counted, and `table` prints
it.
"""
