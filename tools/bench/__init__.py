"""Measures tfgpipe: `python -m tools.bench SUB-COMMAND`.

A sub-command is the module of its name. They share the `models` that they
train. Cells that wait instead of computing are in `waiting_layers`. What runs
in processes of its own is in modules and `peer_programs` that end with
`_worker`; a `step_worker` asks one for a step at a time.
"""
