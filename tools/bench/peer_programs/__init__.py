"""The programs that `python -m tools.bench peers` runs, one for each library.

`tfgpipe_worker`, `lingvo_worker`, `torchgpipe_worker` and `torch_worker` each
begin with how to install their library. They do the same `work`, and take and
answer orders by one `protocol`. `tensorflow_block` and `torch_layers` have the
layers that two of them share; `lingvo_operations` lets Lingvo be imported where
its own library of operations cannot be loaded.

All but `tfgpipe_worker` run in the Python of another library, in which neither
tfgpipe nor absl need be installed: what they import of this checkout needs no
more than NumPy.
"""
