r"""Trains an experiment of `params` through a pipeline.

    python -m tools.train --list
    python -m tools.train --params=lm.transformer_1663 --dry_run
    python -m tools.train --params=lm.transformer_103 --dry_run \
        --num_partitions=16 --schedule=interleaved --num_virtual_devices=4
    python -m tools.train --params=image.amoebanet_d_demo
    python -m tools.train --params=image.amoebanet_d_demo --check
    python -m tools.train --params=image.amoebanet_d_demo \
        --num_partitions=3 --set=model.num_filters=64 --train_dir=runs/wide
    python -m tools.train --params=image.amoebanet_d_demo \
        --num_replicas=2 --workers=host0:2222,host1:2222
    python -m tools.train --params=image.amoebanet_d_18_256 --tpu=local

Flags that are not given keep the experiment's own values. The same command
resumes a run that was killed, if it has a --train_dir.
"""

from tools.train import ends

if __name__ == "__main__":
    ends.catch_signals()
    # These import TensorFlow, which takes long.
    from absl import app, flags

    from tools.train import command
    from tools.train import flags as train_flags

    flags.adopt_module_key_flags(train_flags)
    ends.has_imported()
    app.run(command.program, flags_parser=command.parsed)
