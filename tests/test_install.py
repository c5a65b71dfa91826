"""What is installed: the library, and nothing else."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
from processes import Process, port, until

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
import time
import keras, tensorflow as tf
before = time.process_time()
import tfgpipe
print((time.process_time() - before) / before)
cpu = tf.config.list_physical_devices("CPU")[0]
half = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [half, half])  # none has begun
"""


PIP = "-m", "pip", "--quiet", "--disable-pip-version-check"


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", f"--wheel-dir={folder}", ROOT, cwd="/")
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel):
    """A folder with what the wheel installs, its program in bin/."""
    folder = wheel.parent / "site"
    run(*PIP, "install", "--no-deps", f"--target={folder}", wheel, cwd="/")
    return folder


@pytest.mark.slow
def test_wheel_trains_away_from_the_checkout_beside_another_models(
    wheel, site, tmp_path
):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    version = wheel.name.split("-")[1]
    assert folders == {"tfgpipe", f"tfgpipe-{version}.dist-info"}
    assert "tfgpipe/py.typed" in names
    (tmp_path / "models.py").write_text('OWNER = "someone else"\n')
    printed = run("-c", SCRIPT, cwd=tmp_path, PYTHONPATH=str(site))
    assert printed.split() == [version, str(site / "tfgpipe" / "__init__.py")]


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_program_of_the_wheel_runs_in_an_empty_folder(site, tmp_path):
    known = {"HOME": str(tmp_path), "PYTHONPATH": str(site)}
    program = str(site / "bin" / "tfgpipe"), "worker", "--port=0"
    worker = Process(tmp_path, "worker", *program, cwd=tmp_path, **known)
    try:
        assert until(lambda: port(worker), worker)
    finally:
        worker.kill()


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
    install = "install", "--no-deps", "--editable", checkout
    run(*PIP, "--python", python, *install, cwd="/")
    find = [python, "-c", FIND]
    found = subprocess.check_output(find, cwd=tmp_path, text=True)
    assert found.strip() == str(checkout / "tfgpipe" / "__init__.py")


@pytest.mark.slow
def test_import_is_quick_and_starts_no_device():
    """Beside what TensorFlow and Keras take."""
    share = float(run("-c", IMPORT, cwd=ROOT))
    assert share < 0.2
