"""What models and their devices need, without allocating any of it.

`model_size` counts, with `kept_tensors` for what a layer keeps for its backward
pass; `parameter_counts` has what was counted, and `table` prints it.
"""
