"""Runs on several hosts.

`hosts` says which take part. The `controller` connects to the others over a
`link`; they run `tools.worker`. A `port_filter` keeps others out.
`local_workers` starts such workers on this machine.
"""
