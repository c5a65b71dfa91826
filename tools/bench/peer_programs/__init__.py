"""The same work in tfgpipe and in torch: a program for each.

`work` has what they share; the programs of `tools.bench peers` run in Python
environments of their own. Torch's needs nothing of tfgpipe but this package,
`tools.bench.protocol` and `tools.bench.memory_worker`.
"""
