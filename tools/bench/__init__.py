"""Measures tfgpipe: `python -m tools.bench SUB-COMMAND`.

A sub-command is the module of its name: `efficiency`, `throughput`, `overhead`,
`replicas`, `memory`, `recompute`, `plan` and `peers`. They share their `flags`
and the `models` that they train. Cells that wait instead of computing are in
`timed_layers` and `sleeping_layers`. What runs in processes of its own is in
`replica_worker`, `throughput_worker`, `memory_worker`, `recompute_worker` and
`peer_programs`; a `step_worker` asks it for a step at a time.
"""
