"""`tools.train` with a tiny experiment, in a process of its own.

python tests/tiny_train.py --params=image.tiny --workers=...
"""

from tools.train import ends

if __name__ == "__main__":
    ends.catch_signals()

    import os

    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    import runs
    from absl import app

    from params import datasets, registry
    from tools.train import command

    datasets.LOADERS["noise"] = runs.noise
    registry.register(runs.IMAGE)
    runs.stop_in(os.environ.get("TINY_STOP"))
    ends.has_imported()
    app.run(command.program, flags_parser=command.parsed)
