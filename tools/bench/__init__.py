"""Measures tfgpipe: `python -m tools.bench SUB-COMMAND`.

A sub-command is the room of its name: `efficiency`, `throughput`, `overhead`,
`replicas`, `memory` and `peers`. They share their `flags` and the `models` that
they train. Cells that wait instead of computing are in `timed_layers` and
`sleeping_layers`; what runs in processes of its own, in the rooms
`*_worker`, `memory_trial` and `peer_adapter`.
"""
