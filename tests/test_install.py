"""What is installed: the library, and nothing else."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import keras, models, numpy as np, tfgpipe
assert models.OWNER == "someone else"
layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
model = tfgpipe.GPipe(layers, num_partitions=1, num_micro_batches=2)
model.compile("sgd", "mse")
model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
print(tfgpipe.__version__, tfgpipe.__file__)
"""

# Without TensorFlow it can be found, but not imported.
FIND = """
import importlib.util
print(importlib.util.find_spec("tfgpipe").origin)
"""
IMPORT = """
import keras, tensorflow as tf, time
started = time.process_time()
import tfgpipe
print(time.process_time() - started)
cpu = tf.config.list_physical_devices("CPU")[0]
half = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [half, half])  # none has begun
"""


def run(*command, cwd, **environment):
    result = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_wheel_trains_away_from_the_checkout_beside_another_models(tmp_path):
    pip = "-m", "pip", "--quiet", "--disable-pip-version-check"
    run(*pip, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", ROOT, cwd="/")
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    version = wheel.name.split("-")[1]
    assert folders == {"tfgpipe", f"tfgpipe-{version}.dist-info"}
    assert "tfgpipe/py.typed" in names
    site = tmp_path / "site"
    run(*pip, "install", "--no-deps", f"--target={site}", wheel, cwd="/")
    (tmp_path / "models.py").write_text('OWNER = "someone else"\n')
    printed = run("-c", SCRIPT, cwd=tmp_path, PYTHONPATH=str(site))
    assert printed.split() == [version, str(site / "tfgpipe" / "__init__.py")]


@pytest.mark.slow
def test_editable_install_is_found_beside_a_checkout_of_that_name(tmp_path):
    """The folder is no package, and must not be taken for one."""
    checkout, environment = tmp_path / "tfgpipe", tmp_path / "environment"
    checkout.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, checkout)
    leftovers = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tfgpipe", checkout / "tfgpipe", ignore=leftovers)
    run("-m", "venv", "--without-pip", environment, cwd="/")
    python = environment / "bin" / "python"
    pip = "-m", "pip", "--quiet", "--disable-pip-version-check"
    install = "install", "--no-deps", "--editable", checkout
    run(*pip, "--python", python, *install, cwd="/")
    found = subprocess.run(
        [python, "-c", FIND],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert found.strip() == str(checkout / "tfgpipe" / "__init__.py")


@pytest.mark.slow
def test_import_is_quick_and_starts_no_device():
    """Beside what TensorFlow and Keras take."""
    seconds = float(run("-c", IMPORT, cwd=ROOT))
    assert seconds < 0.3
