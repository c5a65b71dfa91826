"""`tools.train` with a tiny experiment, in a process of its own.

python tests/tiny_train.py --params=image.tiny --workers=...
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import runs
from absl import app

from params import datasets, registry
from tools.train import __main__ as train

if __name__ == "__main__":
    datasets.LOADERS["noise"] = runs.noise
    registry.register(runs.IMAGE)
    app.run(train.main)
